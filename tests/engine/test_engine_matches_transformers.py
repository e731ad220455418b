"""32-bit weights give transformers' logits and greedy tokens; 8-bit weights stay close to them."""

from typing import Any, Literal

import pytest
import torch
import transformers
from engine_driver import DrivenRequest, LogitRecorder, random_prompt, step
from torch import Tensor

from keepwarm.core.request import SamplingParams
from keepwarm.engine.torch.load import build_executor, open_model
from keepwarm.engine.torch.settings import EngineSettings
from keepwarm.engine.torch.weights import ModelWeights
from keepwarm.supply.models import ensure_default_model

LENGTHS = (5, 6, 8, 11, 15, 16, 17, 24, 31, 40, 48, 64, 80, 100, 128, 160, 230, 333, 520, 1500)
NUM_OUTPUT = 64
PRECISIONS: tuple[Literal["fp32", "int8"], ...] = ("fp32", "int8")
CHAT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
"""A short question in the model's chat format."""


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    return open_model(ensure_default_model()).weights


def reference_model(weights: ModelWeights) -> Any:
    """transformers' own model with our dequantised weights, rotary rows put back into halves."""
    config = weights.config
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                max_position_embeddings=config.max_len,
                rms_norm_eps=config.rms_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                tie_word_embeddings=True,
            )
        )

    def halves(rows: Tensor) -> Tensor:
        pairs = rows.view(-1, config.head_dim // 2, 2, rows.shape[1])
        return pairs.transpose(1, 2).reshape(rows.shape)

    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.head,
    }
    for index, layer in enumerate(weights.layers):
        q, k, v = torch.split(layer.qkv, [width, kv_width, kv_width])
        gate, up = layer.gate_up.chunk(2)
        prefix = f"model.layers.{index}."
        state |= {
            f"{prefix}self_attn.q_proj.weight": halves(q),
            f"{prefix}self_attn.k_proj.weight": halves(k),
            f"{prefix}self_attn.v_proj.weight": v,
            f"{prefix}self_attn.o_proj.weight": layer.output,
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up,
            f"{prefix}mlp.down_proj.weight": layer.down,
            f"{prefix}input_layernorm.weight": layer.attention_norm,
            f"{prefix}post_attention_layernorm.weight": layer.mlp_norm,
        }
    model = model.to_empty(device="cpu")
    model.load_state_dict(state, assign=True)
    # The rotary table is a buffer that no file holds; on the meta device it was never computed.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


def test_logits_and_greedy_tokens_equal_transformers(
    weights: ModelWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = LogitRecorder(monkeypatch)
    settings = EngineSettings(weights="fp32", num_device_blocks=400)
    executor = build_executor(weights, settings, name="default", fingerprint="test")
    first_block = 0
    sequences = []
    for seed, length in enumerate(LENGTHS):
        num_blocks = -(-(length + NUM_OUTPUT) // 16)
        prompt = random_prompt(seed, length, weights.config.vocab_size)
        sequences.append(DrivenRequest(f"r{length}", prompt, range(first_block, first_block + num_blocks)))
        first_block += num_blocks
    # Long prompts in chunks, beside the decodes of the short ones; then all decode as one batch.
    while any(len(sequence.output) < NUM_OUTPUT for sequence in sequences):
        open_ones = [sequence for sequence in sequences if len(sequence.output) < NUM_OUTPUT]
        step(executor, *((sequence, 512) for sequence in open_ones))
    model = reference_model(weights)
    for sequence in sequences:
        # One forward pass over prompt and output: if every position's best token is the next one, then
        # transformers would have generated the same tokens.
        with torch.inference_mode():
            expected = model(torch.tensor([sequence.tokens[:-1]]), logits_to_keep=NUM_OUTPUT).logits[0]
        assert expected.argmax(-1).tolist() == sequence.output
        ends = range(sequence.num_prompt, sequence.num_prompt + NUM_OUTPUT)
        ours = torch.stack([logits.rows[sequence.request_id, end] for end in ends])
        assert (ours - expected).abs().max() < 1e-3


def test_eight_bit_weights_stay_close(weights: ModelWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = LogitRecorder(monkeypatch)
    num_output = 48
    greedy = SamplingParams(max_tokens=num_output, temperature=0.0)
    rows: dict[str, Tensor] = {}
    answer: list[int] = []
    for precision in PRECISIONS:
        settings = EngineSettings(weights=precision, num_device_blocks=8)
        executor = build_executor(weights, settings, name="default", fingerprint="test")
        sequence = DrivenRequest(precision, CHAT, range(8), greedy)
        for index in range(num_output):
            step(executor, (sequence, None))
            # The 8-bit model is led along the 32-bit model's answer.
            sequence.tokens[-1:] = answer[index : index + 1] or sequence.tokens[-1:]
        answer = sequence.output
        rows[precision] = torch.stack(
            [row for key, row in sorted(logits.rows.items()) if key[0] == precision]
        )
    exact, close = rows["fp32"].log_softmax(-1), rows["int8"].log_softmax(-1)
    divergence = (exact.exp() * (exact - close)).sum(-1)
    # 0.02 as measured; without the rotation, or with one scale for a whole batch, it is about 0.2.
    assert divergence.mean() < 0.06
    assert (exact.argmax(-1) == close.argmax(-1)).float().mean() > 0.85
