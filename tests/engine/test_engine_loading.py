"""Models are read from Hugging Face folders as transformers reads them; damaged files are named."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from engine_driver import DrivenRequest, LogitRecorder, generate, random_prompt, step, tiny_executor

from keepwarm.core.errors import ConfigurationError, ModelFileError
from keepwarm.engine.torch.load import load_executor
from keepwarm.engine.torch.settings import EngineSettings

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PRECISIONS: tuple[Literal["fp32", "int8"], ...] = ("fp32", "int8")
FP32 = EngineSettings(weights="fp32", num_device_blocks=32)


def save_llama(folder: Path, **changes: Any) -> Any:
    torch.manual_seed(1)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **changes}))
    model.save_pretrained(folder)
    return model.eval()


def save_qwen2(folder: Path) -> Any:
    torch.manual_seed(1)
    model: Any = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE))
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.normal_(projection.bias)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("kind", ["untied", "tied", "llama3 rope", "head_dim", "qwen2"])
def test_folder_gives_the_logits_of_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "qwen2":
        model = save_qwen2(tmp_path)
    else:
        changes: dict[str, dict[str, Any]] = {
            "untied": {},
            "tied": {"tie_word_embeddings": True},
            "llama3 rope": {"rope_parameters": LLAMA3},
            "head_dim": {"head_dim": 32},
        }
        model = save_llama(tmp_path, **changes[kind])
    logits = LogitRecorder(monkeypatch)
    executor = load_executor(tmp_path, FP32)
    sequence = DrivenRequest("r", random_prompt(1, 150, 128), range(12))
    generate(executor, sequence, 3, (100,))
    with torch.inference_mode():
        expected = model(torch.tensor([sequence.tokens[:-1]]), logits_to_keep=3).logits[0]
    ours = torch.stack([logits.rows["r", 150 + index] for index in range(3)])
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


def test_eight_bit_weights_follow_thirty_two_bit_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A bias and eight bits together: the bias has to be rotated with the values.
    save_qwen2(tmp_path)
    logits = LogitRecorder(monkeypatch)
    prompt = random_prompt(1, 60, 128)
    for precision in PRECISIONS:
        settings = EngineSettings(weights=precision, num_device_blocks=8)
        step(load_executor(tmp_path, settings), (DrivenRequest(precision, prompt, range(8)), None))
    exact, close = logits.rows["fp32", 60], logits.rows["int8", 60]
    assert torch.nn.functional.cosine_similarity(exact, close, dim=0) > 0.99


def test_fingerprint_changes_with_weights_and_precision(tmp_path: Path) -> None:
    save_llama(tmp_path)
    first = load_executor(tmp_path, FP32).info.fingerprint
    assert load_executor(tmp_path, FP32).info.fingerprint == first
    assert load_executor(tmp_path, EngineSettings(num_device_blocks=8)).info.fingerprint != first
    save_llama(tmp_path, initializer_range=0.1)
    assert load_executor(tmp_path, FP32).info.fingerprint != first


def test_info_tells_the_limits(tmp_path: Path) -> None:
    save_llama(tmp_path)
    info = load_executor(tmp_path, EngineSettings(num_device_blocks=8, max_model_len=100)).info
    assert (info.vocab_size, info.max_model_len, info.block_size) == (128, 100, 16)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert (
        load_executor(tmp_path, EngineSettings(num_device_blocks=8, max_model_len=9999)).info.max_model_len
        == 512
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"intermediate_size": 100}, "has shape"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2"),
        ({"num_hidden_layers": None}, r"config\.json"),
    ],
)
def test_what_we_cannot_run_is_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    save_llama(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelFileError, match=message):
        load_executor(tmp_path, FP32)


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no model at"):
        load_executor(tmp_path / "nothing.gguf", FP32)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load_executor(tmp_path, FP32)
    broken = tmp_path / "broken.gguf"
    for content in (b"", b"GGUF", b"not a model" * 100):
        broken.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"broken\.gguf"):
            load_executor(broken, FP32)
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 64)
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        load_executor(tmp_path, FP32)


@pytest.mark.parametrize(
    "settings", [{"block_size": 8}, {"block_size": 0}, {"num_device_blocks": 0}, {"max_model_len": 0}]
)
def test_wrong_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        EngineSettings(**settings)  # type: ignore[arg-type]


def test_damaged_state_fails_its_request_alone_and_is_repaired() -> None:
    executor = tiny_executor(EngineSettings(num_device_blocks=64))
    good = DrivenRequest("good", random_prompt(1, 40, 256), range(8))
    bad = DrivenRequest("bad", random_prompt(2, 40, 256), range(8, 16))
    expected = generate(executor, DrivenRequest("alone", good.tokens, range(20, 28)), 3)
    step(executor, (good, None), (bad, None))
    executor.pool.kv[0, 8 * 16 + 3] = torch.nan
    result = step(executor, (good, None), (bad, None))
    assert [failure.request_id for failure in result.failures] == ["bad"]
    assert "bad" not in result.sampled
    step(executor, (good, None))
    assert good.output == expected
    assert executor.pool.kv.isfinite().all()
