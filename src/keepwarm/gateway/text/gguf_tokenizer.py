"""Owns building a `tokenizer.json` text out of a GGUF header (`tokenizer.ggml.*`).

Handles byte-level BPE (`model = gpt2`) with the pre-tokenizers listed in `_PRE_TOKENIZERS`; anything else is
refused by name, since a tokenizer that is only nearly right gives wrong tokens without a sign.
Called by `assets` only.
"""

import json
from collections.abc import Callable
from typing import TypeAlias

from keepwarm.core.errors import ModelFileError
from keepwarm.supply.gguf_header import Metadata

Json: TypeAlias = dict[str, object]

# Values of `tokenizer.ggml.token_type` (llama.cpp's llama_token_type).
_CONTROL = 3
_USER_DEFINED = 4

# How Llama 3 and Qwen 2 cut text into words. They differ only in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split_then_bytes(regex: str) -> Json:
    split: Json = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


def _gpt2() -> Json:
    return _byte_level(use_regex=True)


def _smollm() -> Json:
    # Each digit alone, before the words are cut: a run of blanks before a digit then stays one piece.
    digits: Json = {"type": "Digits", "individual_digits": True}
    return {"type": "Sequence", "pretokenizers": [digits, _byte_level(use_regex=True)]}


def _llama3() -> Json:
    return _split_then_bytes(_WORDS.replace("DIGITS", "{1,3}"))


def _qwen2() -> Json:
    return _split_then_bytes(_WORDS.replace("DIGITS", ""))


_PRE_TOKENIZERS: dict[str, Callable[[], Json]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": _qwen2,
}
# Llama 3's words that are whole tokens are taken as such, without asking the merges.
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})
_NORMALIZED_NFC = frozenset({"qwen2"})


def tokenizer_json_from_gguf(metadata: Metadata) -> str:
    """The text of a `tokenizer.json` that encodes as the model was trained.

    Raises `ModelFileError` for a tokenizer kind or pre-tokenizer that is not known here, or missing lists.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelFileError(
            f"the GGUF file has a tokenizer of kind {kind!r}; only 'gpt2' (byte-level BPE) can be built. "
            "Use the model's Hugging Face folder with its tokenizer.json instead."
        )
    pre = metadata.get("tokenizer.ggml.pre")
    make_pre_tokenizer = _PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    if make_pre_tokenizer is None:
        raise ModelFileError(
            f"the GGUF file names the pre-tokenizer {pre!r}; known are {', '.join(sorted(_PRE_TOKENIZERS))}. "
            "Use the model's Hugging Face folder with its tokenizer.json instead."
        )
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    merges = _texts(metadata, "tokenizer.ggml.merges")
    document: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, metadata.get("tokenizer.ggml.token_type")),
        "normalizer": {"type": "NFC"} if pre in _NORMALIZED_NFC else None,
        "pre_tokenizer": make_pre_tokenizer(),
        "post_processor": _post_processor(metadata, tokens),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _WHOLE_WORDS_FIRST,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            # Pairs, not "a b" texts: a byte-level token never holds a blank, but pairs need no such argument.
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _texts(metadata: Metadata, key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, tuple) or not value:
        raise ModelFileError(f"the GGUF file has no list {key}; it holds no usable tokenizer.")
    return [str(item) for item in value]


def _added_tokens(tokens: list[str], kinds: object) -> list[Json]:
    if not isinstance(kinds, tuple):
        return []
    if len(kinds) != len(tokens):
        raise ModelFileError(
            f"the GGUF file has {len(tokens)} tokens but {len(kinds)} token types. "
            "It is damaged: fetch it again."
        )
    return [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for token_id, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _post_processor(metadata: Metadata, tokens: list[str]) -> Json | None:
    """Puts the begin token before a raw prompt when the file says so."""
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") is not True or not isinstance(bos_id, int):
        return None
    if not 0 <= bos_id < len(tokens):
        raise ModelFileError(f"the GGUF file's begin token {bos_id} is outside its {len(tokens)} tokens.")
    bos = tokens[bos_id]
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
