"""Owns WorkerSettings: what one simulated worker holds and how much it does in a step.

Never checks a workload against it. Made by the simulated root, read by `sim.cluster.worker` and the loop.
"""

import enum
from dataclasses import dataclass


class Stepping(enum.StrEnum):
    COALESCED = "coalesced"
    """Steps that only decode, and do so with the same requests, are taken together."""
    SINGLE = "single"
    """Each step is an event of its own: the slow reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    block_size: int
    num_blocks: int
    """Of the device."""
    num_host_blocks: int = 0
    max_batch_tokens: int = 8192
    """Most tokens in one step."""
    max_running: int = 64
    """Most requests that hold device blocks at the same time."""
    report_tokens: int = 512
    """Admission hears of a running request each time it has generated so many more tokens."""
    stepping: Stepping = Stepping.COALESCED

    def __post_init__(self) -> None:
        if min(self.block_size, self.num_blocks, self.max_batch_tokens, self.max_running) < 1:
            raise ValueError("a worker needs blocks of at least one token, a batch and a slot")
        if self.max_running > self.max_batch_tokens:
            raise ValueError(
                f"max_running {self.max_running} is more than max_batch_tokens {self.max_batch_tokens}: "
                "requests could not all decode in one step"
            )

    @property
    def num_tokens(self) -> int:
        """KV tokens that fit the device."""
        return self.num_blocks * self.block_size
