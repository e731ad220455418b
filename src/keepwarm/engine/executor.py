"""Owns the Executor protocol: the seam behind which a step is really computed, scripted or priced.

Never schedules. Implemented by `engine.torch.runner` and by `keepwarm.testing` (scripted tokens and times);
driven by `workers.engine_loop`.
"""

from dataclasses import dataclass
from typing import Protocol

from keepwarm.scheduling.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the layers above need to know about a model."""

    name: str
    fingerprint: str
    """Stable hash of weights and quantisation: part of every block key."""
    vocab_size: int
    max_model_len: int
    """Most positions in one sequence, in tokens."""
    block_size: int
    kv_bytes_per_token: int


class Executor(Protocol):
    """Runs one step at a time, on one thread. Holds KV bytes, never request state."""

    @property
    def info(self) -> ModelInfo: ...

    def run(self, plan: StepPlan) -> StepResult:
        """Run `plan` and return one sampled token per sampled chunk.

        A failure that concerns one chunk is reported in `StepResult.failures`; an exception means that the
        whole step is lost and that no KV written by it may be used.
        """
        ...

    def close(self) -> None: ...
