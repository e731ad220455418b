"""The GGUF header reader and the tokenizer built from it, on small files written here."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from keepwarm.core.errors import ModelFileError
from keepwarm.gateway.text.assets import load_text_assets
from keepwarm.gateway.text.tokenizer import TextTokenizer
from keepwarm.supply.gguf_header import read_gguf_metadata
from keepwarm.testing.text import byte_text_assets

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(kind: int, value: object) -> bytes:
    if kind == 8:
        return _text(str(value))
    if kind == 7:
        return bytes([bool(value)])
    if kind == 9:
        assert isinstance(value, tuple)
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    return struct.pack("<" + _CODES[kind], value)


def _gguf(entries: Mapping[str, tuple[int, object]], *, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, 0, len(entries))
    return head + b"".join(
        _text(key) + struct.pack("<I", kind) + _value(kind, value) for key, (kind, value) in entries.items()
    )


def _tokenizer_entries(pre: str, /, **more: tuple[int, object]) -> dict[str, tuple[int, object]]:
    document = json.loads(byte_text_assets().tokenizer_json)
    tokens = list(document["model"]["vocab"])
    specials = {token["content"] for token in document["added_tokens"]}
    entries: dict[str, tuple[int, object]] = {
        "tokenizer.ggml.model": (8, "gpt2"),
        "tokenizer.ggml.pre": (8, pre),
        "tokenizer.ggml.tokens": (9, (8, tokens)),
        "tokenizer.ggml.token_type": (9, (5, [3 if token in specials else 1 for token in tokens])),
        "tokenizer.ggml.merges": (9, (8, [" ".join(pair) for pair in document["model"]["merges"]])),
        "tokenizer.ggml.bos_token_id": (4, tokens.index("<|im_start|>")),
        "tokenizer.ggml.eos_token_id": (4, tokens.index("<|im_end|>")),
        "tokenizer.chat_template": (8, "{{ messages }}"),
    }
    return entries | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def _write(folder: Path, entries: Mapping[str, tuple[int, object]], *, version: int = 3) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(_gguf(entries, version=version))
    return path


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    entries: dict[str, tuple[int, object]] = {
        "u8": (0, 200),
        "i8": (1, -2),
        "u16": (2, 60000),
        "i16": (3, -3),
        "u32": (4, 4_000_000_000),
        "i32": (5, -5),
        "f32": (6, 0.5),
        "yes": (7, True),
        "text": (8, "é\n"),
        "u64": (10, 2**63),
        "i64": (11, -(2**40)),
        "f64": (12, 0.1),
        "texts": (9, (8, ["a", ""])),
        "flags": (9, (7, [True, False])),
        "numbers": (9, (5, [1, -1])),
        "none": (9, (8, [])),
    }
    expected = {
        key: tuple(value[1]) if isinstance(value, tuple) else value for key, (_, value) in entries.items()
    }
    assert dict(read_gguf_metadata(_write(tmp_path, entries))) == expected
    assert dict(read_gguf_metadata(_write(tmp_path, entries, version=2))) == expected


def test_a_file_torn_anywhere_is_refused(tmp_path: Path) -> None:
    whole = _gguf({"a": (8, "text"), "b": (9, (8, ["x", "y"])), "c": (9, (5, [1, 2])), "d": (7, True)})
    path = tmp_path / "torn.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError):
            read_gguf_metadata(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04 a zip", "does not begin"),
        (_gguf({}, version=9), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _text("k") + struct.pack("<I", 77), "unknown type 77"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _text("k") + struct.pack("<IIQ", 9, 5, 2**60),
            "incomplete",
        ),
    ],
)
def test_other_files_are_refused_with_a_reason(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=words):
        read_gguf_metadata(path)


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no model at"):
        load_text_assets(tmp_path / "nothing")


def test_the_assets_of_a_file(tmp_path: Path) -> None:
    assets = load_text_assets(_write(tmp_path, _tokenizer_entries("smollm", add_bos_token=(7, True))))
    tokenizer = TextTokenizer(assets.tokenizer_json)
    ids = tokenizer.special_ids
    assert set(ids) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    # The file's own end token first, then control tokens that end an answer by their name.
    assert assets.eos_token_ids == (ids["<|im_end|>"], ids["<|endoftext|>"])
    assert (assets.bos_token, assets.eos_token, assets.add_bos) == ("<|im_start|>", "<|im_end|>", True)
    assert assets.chat_template == "{{ messages }}"
    assert tokenizer.encode("x", add_special=True) == (ids["<|im_start|>"], ord("x"))
    assert tokenizer.encode("x") == (ord("x"),)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        # The merge of two blanks shows where words are cut before a digit.
        ("smollm", "a  12", ["a", "  ", "1", "2"]),
        ("gpt-2", "a  12", ["a", " ", " ", "1", "2"]),
        ("llama-bpe", "a  12", ["a", " ", " ", "1", "2"]),
        ("llama-bpe", "|>\n\n", ["|>", "\n\n"]),
        ("smollm", "\n\n\n", ["\n\n", "\n"]),
    ],
)
def test_pre_tokenizers_cut_as_they_should(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = TextTokenizer(load_text_assets(_write(tmp_path, _tokenizer_entries(pre))).tokenizer_json)
    assert [tokenizer.token_text(i) for i in tokenizer.encode(text)] == pieces


@pytest.mark.parametrize(
    ("pre", "longest"), [("llama-bpe", 3), ("llama3", 3), ("qwen2", 1), ("smollm", 1), ("gpt-2", 6)]
)
def test_how_many_digits_stay_together(tmp_path: Path, pre: str, longest: int) -> None:
    entries = _tokenizer_entries(pre)
    document = json.loads(byte_text_assets().tokenizer_json)
    runs = ["123456"[:n] for n in range(2, 7)]
    tokens = [*document["model"]["vocab"], *runs]
    entries["tokenizer.ggml.tokens"] = (9, (8, tokens))
    entries["tokenizer.ggml.token_type"] = (9, (5, [1] * len(tokens)))
    entries["tokenizer.ggml.merges"] = (9, (8, [f"{run[:-1]} {run[-1]}" for run in runs]))
    tokenizer = TextTokenizer(load_text_assets(_write(tmp_path, entries)).tokenizer_json)
    assert max(len(tokenizer.token_text(i)) for i in tokenizer.encode("123456")) == longest


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(load_text_assets(_write(tmp_path, _tokenizer_entries("qwen2"))).tokenizer_json)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("pre", (8, "deepseek-llm"), "'deepseek-llm'"),
        ("pre", (4, 7), "pre-tokenizer 7"),
        ("model", (8, "llama"), "'llama'"),
        ("tokens", (9, (8, [])), "tokens"),
        ("merges", (4, 1), "merges"),
        ("token_type", (9, (5, [1])), "token types"),
    ],
)
def test_what_cannot_be_built_is_named(
    tmp_path: Path, key: str, value: tuple[int, object], words: str
) -> None:
    with pytest.raises(ModelFileError, match=words):
        load_text_assets(_write(tmp_path, _tokenizer_entries("smollm", **{key: value})))
