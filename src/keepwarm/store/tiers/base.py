"""Owns the BlockStore protocol: the seam behind which the bytes of blocks are really moved.

Never decides what moves: it executes a prepared `Move`. Implemented by `tiers.local` (device and host
memory) and by `tiers.counted` (sizes only: scripted engine and simulator); faults are injected by wrapping
it. Disk and remote tiers become further implementations behind the same call.
"""

from dataclasses import dataclass
from typing import Protocol

from keepwarm.core.blocks import Tier
from keepwarm.store.block import Move


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """What a move did. When `error` is set, the destination holds nothing usable."""

    num_bytes: int
    duration_s: float
    error: str | None = None


class BlockStore(Protocol):
    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        ...

    def num_slots(self, tier: Tier) -> int:
        """Capacity of `tier` in blocks; 0 when the tier is absent."""
        ...

    def execute(self, move: Move) -> MoveOutcome:
        """Copy the bytes of `move`. Never raises for a failed copy: it reports it."""
        ...

    def close(self) -> None: ...
