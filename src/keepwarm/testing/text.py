"""Owns the text side of a model that does not exist: one token per byte, a few merges, ChatML.

Lets gateway tests encode, render and parse for real without a model file. Never claims to compress.
"""

import json

from keepwarm.gateway.text.assets import TextAssets

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Few, but enough that texts which meet may merge.
_MERGES = (("<", "|"), ("|", ">"), ("\u010a", "\u010a"), ("\u0120", "\u0120"), ("h", "i"), (">", "\u010a"))


def byte_text_assets(*, chat_template: str | None = CHATML) -> TextAssets:
    """Ids 0-255 are bytes, then the merges, then `SPECIAL_TOKENS`. `<|im_end|>` ends an answer."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    characters = [chr(byte) if byte in visible else chr(0x100 + hidden.index(byte)) for byte in range(0x100)]
    tokens = [*characters, *(left + right for left, right in _MERGES), *SPECIAL_TOKENS]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": tokens.index(text), "content": text, **flags} for text in SPECIAL_TOKENS],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [list(pair) for pair in _MERGES],
        },
    }
    return TextAssets(
        tokenizer_json=json.dumps(document),
        chat_template=chat_template,
        eos_token_ids=(tokens.index("<|im_end|>"),),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        add_bos=False,
    )
