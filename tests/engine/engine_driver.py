"""Drives a TorchExecutor through StepPlans, and builds tiny models with random weights."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from keepwarm.core.ids import RequestId
from keepwarm.core.request import SamplingParams
from keepwarm.engine.torch import sampler
from keepwarm.engine.torch.config import ModelConfig
from keepwarm.engine.torch.load import build_executor
from keepwarm.engine.torch.runner import TorchExecutor
from keepwarm.engine.torch.settings import EngineSettings
from keepwarm.engine.torch.weights import LayerWeights, ModelWeights
from keepwarm.scheduling.plan import Chunk, StepPlan, StepResult

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)

TINY = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=256,
    max_len=2048,
    rope_theta=10000.0,
    rms_eps=1e-5,
)


def tiny_weights(config: ModelConfig = TINY) -> ModelWeights:
    """Random weights whose logits are far from ties."""
    generator = torch.Generator().manual_seed(5)

    def matrix(outputs: int, inputs: int) -> Tensor:
        rows: Tensor = torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)
        return rows

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(config.hidden_size, generator=generator)

    hidden, inner, width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            qkv=matrix(rows, hidden) * 2,
            qkv_bias=None,
            output=matrix(hidden, width),
            mlp_norm=norm(),
            gate_up=matrix(2 * inner, hidden),
            down=matrix(hidden, inner),
        )
        for _ in range(config.num_layers)
    )
    return ModelWeights(
        config=config,
        embedding=torch.randn(config.vocab_size, hidden, generator=generator),
        layers=layers,
        final_norm=norm(),
        head=matrix(config.vocab_size, hidden) * 4,
    )


def tiny_executor(settings: EngineSettings) -> TorchExecutor:
    return build_executor(tiny_weights(), settings, name="tiny", fingerprint="tiny")


def random_prompt(seed: int, size: int, vocab_size: int) -> list[int]:
    return random.Random(seed).choices(range(3, vocab_size), k=size)


class DrivenRequest:
    """One request: what has been run of it and what it generated."""

    def __init__(
        self, name: str, prompt: Sequence[int], blocks: Sequence[int], sampling: SamplingParams = GREEDY
    ) -> None:
        self.request_id = RequestId(name)
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.num_done = 0
        self._blocks = tuple(blocks)
        self._sampling = sampling

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def chunk(self, size: int | None = None) -> Chunk:
        """The next `size` tokens that have not run, or all of them."""
        end = len(self.tokens) if size is None else min(self.num_done + size, len(self.tokens))
        start, self.num_done = self.num_done, end
        return Chunk(
            request_id=self.request_id,
            token_ids=tuple(self.tokens[start:end]),
            start=start,
            block_ids=self._blocks,
            is_sampled=end == len(self.tokens),
            is_prefill=start < self.num_prompt,
            sampling=self._sampling,
            prompt_token_ids=tuple(self.tokens[: self.num_prompt]),
            output_token_ids=tuple(self.output),
            num_output_tokens=len(self.output),
        )


def step(executor: TorchExecutor, *work: tuple[DrivenRequest, int | None]) -> StepResult:
    """Run one step over the given sequences and append what was sampled."""
    result = executor.run(StepPlan(step_id=0, chunks=tuple(sequence.chunk(size) for sequence, size in work)))
    for sequence, _ in work:
        if sequence.request_id in result.sampled:
            sequence.tokens.append(result.sampled[sequence.request_id].token_id)
    return result


def generate(
    executor: TorchExecutor, sequence: DrivenRequest, count: int, chunk_sizes: Sequence[int] = ()
) -> list[int]:
    """Prefill in chunks of the given sizes (the rest at once), then decode until there are `count` tokens."""
    for size in chunk_sizes:
        if sequence.num_done < sequence.num_prompt:
            step(executor, (sequence, size))
    while len(sequence.output) < count:
        result = step(executor, (sequence, None))
        assert not result.failures
    return sequence.output


class LogitRecorder:
    """Keeps the raw logits of every sampled row, by request and position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[str, int], Tensor] = {}
        original: Callable[..., object] = sampler.sample_rows

        def record(logits: Tensor, chunks: Sequence[Chunk]) -> object:
            for row, chunk in zip(logits, chunks, strict=True):
                self.rows[chunk.request_id, chunk.start + len(chunk.token_ids)] = row.clone()
            return original(logits, chunks)

        monkeypatch.setattr(sampler, "sample_rows", record)
