"""Owns the BlockStore protocol: the seam behind which the bytes of blocks are really moved.

Never decides what moves: it executes prepared tasks. Implemented by `tiers.local` (memory of this process and
the keyed tiers behind it) and by `tiers.counted` (sizes only: scripted engine and simulator); faults are
injected by wrapping it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from keepwarm.core.blocks import Tier
from keepwarm.store.block import BackgroundTask, Move
from keepwarm.store.record import BlockRead
from keepwarm.store.tiers.keyed import StoredEntry


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """What a move within memory did. When `error` is set, the destination holds nothing usable."""

    num_bytes: int
    duration_s: float
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """What a task on a slow tier did. With `error` the tier failed as a whole; what came before it counts."""

    duration_s: float
    num_bytes: int = 0
    reads: tuple[BlockRead, ...] = ()
    """For a move from the tier: what became of its blocks, from the first on; the rest was not tried."""
    stored_bytes: tuple[int, ...] = ()
    """For a move to the tier: what its blocks take there, from the first on; the rest is not stored."""
    num_leading: int = 0
    """For a probe."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TierFacts:
    """What the store must know about a slow tier."""

    name: str
    is_writable: bool
    capacity_bytes: int | None
    """None: not ours to decide."""
    is_shared: bool = False
    """Whether others put blocks there too, so that it is worth asking for blocks it was never given."""


class BlockStore(Protocol):
    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        ...

    def num_slots(self, tier: Tier) -> int:
        """Capacity in blocks of device or host; 0 when the tier is absent."""
        ...

    @property
    def slow_tiers(self) -> Mapping[Tier, TierFacts]:
        """The keyed tiers that are configured."""
        ...

    def entries(self, tier: Tier) -> Iterable[StoredEntry]:
        """What a slow tier holds at the start, oldest first."""
        ...

    def execute(self, move: Move) -> MoveOutcome:
        """Copy the bytes of `move` within memory. Never raises for a failed copy: it reports it."""
        ...

    def execute_task(self, task: BackgroundTask, is_cancelled: Callable[[], bool]) -> TaskOutcome:
        """Run a task on a slow tier, looking at `is_cancelled` now and then. Never raises, never hangs.

        Called from other threads than `execute`: at most one that reads and one that writes for each tier.
        """
        ...

    def close(self) -> None: ...
