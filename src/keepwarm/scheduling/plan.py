"""Owns StepPlan and StepResult: the contract between scheduling and an executor.

Never decides what to run and never runs it. Built by `scheduling.scheduler`, consumed by every
`engine.executor.Executor`.
"""

from dataclasses import dataclass

from keepwarm.core.events import SampledToken
from keepwarm.core.ids import RequestId
from keepwarm.core.request import SamplingParams
from keepwarm.store.block import Move


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive tokens of one request that run in this step.

    The executor writes KV for positions `start .. start + len(token_ids)` and attends to everything
    before. Position p lives in `block_ids[p // block_size]` at offset `p % block_size`.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    start: int
    """Position of `token_ids[0]`: the number of tokens already in KV."""
    block_ids: tuple[int, ...]
    """Device blocks covering positions 0 to `start + len(token_ids)`, in order."""
    is_sampled: bool
    """Whether a next token is wanted after the last position: true for decode and for the last prefill chunk."""
    is_prefill: bool
    sampling: SamplingParams
    prompt_token_ids: tuple[int, ...] = ()
    """Whole prompt, only when a repetition penalty needs it; else empty."""
    output_token_ids: tuple[int, ...] = ()
    """Everything generated so far, only when a penalty needs it; else empty."""
    num_output_tokens: int = 0
    """Tokens generated so far: with `sampling.seed` it fixes the random draw of this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One engine step. Moves run first, in order; chunks then run as one batch."""

    step_id: int
    chunks: tuple[Chunk, ...]
    moves: tuple[Move, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFailure:
    """One request's own failure: only that request ends."""

    request_id: RequestId
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    step_id: int
    sampled: dict[RequestId, SampledToken]
    """One entry for each chunk with `is_sampled` that did not fail."""
    duration_s: float
    failures: tuple[ChunkFailure, ...] = ()
