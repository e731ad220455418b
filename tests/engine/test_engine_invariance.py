"""A request's bits do not depend on chunking, batching or the place of its blocks."""

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from engine_driver import DrivenRequest, LogitRecorder, generate, random_prompt, step, tiny_executor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from keepwarm.engine.torch.load import load_executor
from keepwarm.engine.torch.runner import TorchExecutor
from keepwarm.engine.torch.settings import EngineSettings
from keepwarm.engine.torch.stability import KEY_SPAN, probe_stability
from keepwarm.supply.models import ensure_default_model

NUM_OUTPUT = 4
Precision = Literal["int8", "fp32"]


def assert_same(left: Tensor, right: Tensor, head_dim: int) -> None:
    """Equal bits where the BLAS can give them (all x86 machines seen so far), else equal to rounding."""
    if probe_stability(head_dim).is_exact:
        assert torch.equal(left, right)
    else:
        torch.testing.assert_close(left, right, atol=1e-3, rtol=0)


def kv_of(executor: TorchExecutor, blocks: Sequence[int], num_tokens: int) -> Tensor:
    size = executor.info.block_size
    slots = torch.tensor([blocks[p // size] * size + p % size for p in range(num_tokens)])
    return executor.pool.kv.index_select(1, slots)


def run_alone(
    executor: TorchExecutor, prompt: list[int], blocks: list[int], sizes: Sequence[int], logits: LogitRecorder
) -> tuple[list[int], Tensor, Tensor]:
    """Tokens, KV and logits of one request."""
    logits.rows.clear()
    output = generate(executor, DrivenRequest("alone", prompt, blocks), NUM_OUTPUT, sizes)
    rows = torch.stack([row for _, row in sorted(logits.rows.items())])
    return output, kv_of(executor, blocks, len(prompt) + NUM_OUTPUT - 1), rows


@pytest.mark.parametrize("weights", ["int8", "fp32"])
@given(data=st.data())
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_chunks_and_scattered_blocks_change_no_bit(
    weights: Precision, data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        logits = LogitRecorder(patch)
        executor = tiny_executor(EngineSettings(weights=weights, num_device_blocks=96))
        length = data.draw(st.integers(1, 700), label="length")
        prompt = random_prompt(length, length, 256)
        num_blocks = -(-(length + NUM_OUTPUT) // 16)
        whole = run_alone(executor, prompt, list(range(num_blocks)), (), logits)
        sizes = data.draw(st.lists(st.integers(1, 300), max_size=6), label="chunk sizes")
        blocks = data.draw(st.permutations(range(96)), label="blocks")[:num_blocks]
        cut = run_alone(executor, prompt, list(blocks), sizes, logits)
        assert cut[0] == whole[0]
        assert_same(cut[1], whole[1], 16)
        assert_same(cut[2], whole[2], 16)


@pytest.mark.parametrize("weights", ["int8", "fp32"])
def test_neighbours_in_the_batch_change_no_bit(weights: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = LogitRecorder(monkeypatch)
    executor = tiny_executor(EngineSettings(weights=weights, num_device_blocks=256))
    lengths = (1, 5, 16, 130, 257, 511, 600, 33)
    prompts = [random_prompt(seed, size, 256) for seed, size in enumerate(lengths)]
    places = [list(range(50 * index % 200, 50 * index % 200 + 45)) for index in range(len(lengths))]
    alone = [run_alone(executor, prompt, list(range(45)), (), logits) for prompt in prompts]
    # Two groups, as the pool holds four sequences at a time.
    for group in (range(4), range(4, 8)):
        logits.rows.clear()
        together = [DrivenRequest(f"r{index}", prompts[index], places[index]) for index in group]
        first, *rest = together
        step(executor, (first, None), *((sequence, 100) for sequence in rest))
        while any(len(sequence.output) < NUM_OUTPUT for sequence in together):
            open_ones = [sequence for sequence in together if len(sequence.output) < NUM_OUTPUT]
            step(executor, *((sequence, 77) for sequence in reversed(open_ones)))
        for index, sequence in zip(group, together, strict=True):
            assert sequence.output == alone[index][0]
            num_tokens = len(prompts[index]) + NUM_OUTPUT - 1
            assert_same(kv_of(executor, places[index], num_tokens), alone[index][1], 16)
            rows = [
                logits.rows[sequence.request_id, num_tokens - NUM_OUTPUT + 1 + n] for n in range(NUM_OUTPUT)
            ]
            assert_same(torch.stack(rows), alone[index][2], 16)


def test_default_model_gives_the_same_bits_in_one_chunk_and_in_many(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = LogitRecorder(monkeypatch)
    executor = load_executor(ensure_default_model(), EngineSettings(num_device_blocks=96))
    prompt = random_prompt(1, 560, 49_000)
    whole = run_alone(executor, prompt, list(range(40)), (), logits)
    scattered = [*range(50, 60), *range(61, 80), *range(40, 50), 95]
    cut = run_alone(executor, prompt, scattered, (1, 2, 250, 44, 250), logits)
    assert cut[0] == whole[0]
    assert_same(cut[1], whole[1], 64)
    assert_same(cut[2], whole[2], 64)


def test_padded_lengths_are_stable_and_cover() -> None:
    stability = probe_stability(64)
    assert stability.pad_length(KEY_SPAN) == KEY_SPAN
    for num_keys in range(1, 3 * KEY_SPAN):
        padded = stability.pad_length(num_keys)
        assert num_keys <= padded < num_keys + KEY_SPAN
        assert padded % 16 == 0
        assert stability.pad_length(padded) == padded
