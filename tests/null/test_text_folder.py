"""A Hugging Face folder as a source of the text side."""

import json
from pathlib import Path

import pytest

from keepwarm.core.errors import ModelFileError
from keepwarm.gateway.text.assets import load_text_assets
from keepwarm.testing.text import byte_text_assets


def _folder(path: Path, **files: object) -> Path:
    (path / "tokenizer.json").write_text(byte_text_assets().tokenizer_json, encoding="utf-8")
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def test_tokens_by_name_or_object_and_end_ids_from_both_configs(tmp_path: Path) -> None:
    folder = _folder(
        tmp_path,
        tokenizer_config={
            "bos_token": {"content": "<|im_start|>"},
            "eos_token": "<|im_end|>",
            "add_bos_token": True,
            "chat_template": "from config",
        },
        generation_config={"eos_token_id": [5, 6]},
        config={"eos_token_id": 5},
    )
    assets = load_text_assets(folder)
    end = json.loads(assets.tokenizer_json)["model"]["vocab"]["<|im_end|>"]
    assert assets.eos_token_ids == (5, 6, end)
    assert (assets.bos_token, assets.eos_token, assets.add_bos) == ("<|im_start|>", "<|im_end|>", True)
    assert assets.chat_template == "from config"


def test_a_bare_folder_says_nothing_more_than_it_holds(tmp_path: Path) -> None:
    assets = load_text_assets(_folder(tmp_path))
    assert (assets.chat_template, assets.eos_token_ids, assets.bos_token, assets.add_bos) == (
        None,
        (),
        None,
        False,
    )


def test_the_template_file_wins_over_the_configs(tmp_path: Path) -> None:
    folder = _folder(
        tmp_path, tokenizer_config={"chat_template": "config"}, chat_template={"chat_template": "json"}
    )
    assert load_text_assets(folder).chat_template == "json"
    (folder / "chat_template.jinja").write_text("jinja", encoding="utf-8")
    assert load_text_assets(folder).chat_template == "jinja"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert load_text_assets(_folder(tmp_path, tokenizer_config={"chat_template": named})).chat_template == "d"


def test_damaged_folders_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        load_text_assets(tmp_path)
    folder = _folder(tmp_path, config=[1])
    with pytest.raises(ModelFileError, match=r"config\.json holds a list"):
        load_text_assets(folder)
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"config\.json is not valid JSON"):
        load_text_assets(folder)
    (folder / "config.json").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match=r"cannot read .*config\.json"):
        load_text_assets(folder)
