"""Owns reading a model's text side from disk: tokenizer, chat template, end tokens.

Never reads weights and never guesses: what a file does not say stays `None`. Called by `compose` when a
model is loaded; everything behind it works on `TextAssets`, which does not know where it came from.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from keepwarm.core.errors import ModelFileError
from keepwarm.gateway.text.gguf_tokenizer import tokenizer_json_from_gguf
from keepwarm.supply.gguf_header import Metadata, read_gguf_metadata

# GGUF names one end token per purpose; a model may still end with one of these, which no file lists.
_END_TOKEN_NAMES = frozenset(
    {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"}
)
_CONTROL = 3


@dataclass(frozen=True, slots=True)
class TextAssets:
    """What a model's files say about text."""

    tokenizer_json: str
    """The content of a Hugging Face `tokenizer.json`."""
    chat_template: str | None
    """Jinja source, or None when the model is not a chat model."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer; the file's own end token first. Empty when no file names one."""
    bos_token: str | None
    eos_token: str | None
    add_bos: bool
    """Whether a raw prompt (not a chat) begins with the begin token."""


def load_text_assets(path: Path) -> TextAssets:
    """Read a GGUF file or a Hugging Face folder. Raises `ModelFileError` with the file at fault."""
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_gguf(read_gguf_metadata(path))
    raise ModelFileError(
        f"there is no model at {path}. Give a GGUF file or a folder that holds tokenizer.json."
    )


def _from_gguf(metadata: Metadata) -> TextAssets:
    tokenizer_json = tokenizer_json_from_gguf(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, tuple)  # the builder has refused anything else
    kinds = metadata.get("tokenizer.ggml.token_type")

    def named(purpose: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{purpose}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    bos, eos = named("bos"), named("eos")
    ends = [eos, named("eot"), named("eom")]
    if isinstance(kinds, tuple):
        ends += [i for i, kind in enumerate(kinds) if kind == _CONTROL and tokens[i] in _END_TOKEN_NAMES]
    template = metadata.get("tokenizer.chat_template")
    return TextAssets(
        tokenizer_json=tokenizer_json,
        chat_template=template if isinstance(template, str) else None,
        eos_token_ids=_distinct(end for end in ends if end is not None),
        bos_token=None if bos is None else str(tokens[bos]),
        eos_token=None if eos is None else str(tokens[eos]),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token") is True,
    )


def _from_folder(folder: Path) -> TextAssets:
    tokenizer_json = _text(folder / "tokenizer.json")
    if tokenizer_json is None:
        raise ModelFileError(
            f"{folder} has no tokenizer.json. Give the folder that holds the model's Hugging Face files."
        )
    config = _object(folder / "tokenizer_config.json")
    eos_token = _token_text(config.get("eos_token"))
    ends = [
        token_id
        for name in ("generation_config.json", "config.json")
        for token_id in _ids(_object(folder / name).get("eos_token_id"))
    ]
    if eos_token is not None:
        ends += _ids(_added_token_id(tokenizer_json, eos_token, folder))
    return TextAssets(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, config),
        eos_token_ids=_distinct(ends),
        bos_token=_token_text(config.get("bos_token")),
        eos_token=eos_token,
        add_bos=config.get("add_bos_token") is True,
    )


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    """The newest of the three places where a template may lie."""
    source = _text(folder / "chat_template.jinja")
    if source is not None:
        return source
    found = _object(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):  # several named templates: [{"name", "template"}]
        named = {str(item.get("name")): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _added_token_id(tokenizer_json: str, content: str, folder: Path) -> object:
    try:
        added = json.loads(tokenizer_json).get("added_tokens", [])
        return next((token["id"] for token in added if token["content"] == content), None)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ModelFileError(f"{folder / 'tokenizer.json'} is not a tokenizer file: {error!r}.") from error


def _token_text(value: object) -> str | None:
    """Token names are plain texts or objects with a `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _distinct(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))


def _object(path: Path) -> Mapping[str, object]:
    text = _text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}. Fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a {type(value).__name__}, not a JSON object.")
    return value


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"cannot read {path}: {error}.") from error
