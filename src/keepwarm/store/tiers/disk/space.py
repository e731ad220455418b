"""Owns DiskSpace: how a byte budget is split between segments, the reserve for compaction, and wanted blocks.

Pure arithmetic. Called by `DiskTier.open`; people who size a disk tier read `smallest_budget`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from keepwarm.core.errors import ConfigurationError
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.segment import (
    ENTRY_BYTES,
    MOST_SEGMENT_BYTES,
    OVERHEAD_BYTES,
    max_record_bytes,
)

DEFAULT_MOST_SEGMENT_BYTES = 256 << 20
_LEAST_SEGMENT_BYTES = 4096
_SEGMENTS_IN_BUDGET = 32
_LEAST_SEGMENTS_IN_BUDGET = 4


@dataclass(frozen=True, slots=True)
class DiskSpace:
    budget_bytes: int
    """The segment files never take more."""
    segment_bytes: int
    """A segment is sealed before it grows beyond."""
    reserve_bytes: int
    """Kept free for the copy that compacting a segment makes."""

    @property
    def capacity_bytes(self) -> int:
        """Most bytes of wanted blocks: four fifths of what may be filled.

        So when all is filled, a fifth is dead on average, the segment with most dead bytes has at least that
        share, and each byte written costs at most four bytes of copying (measured: far less, since blocks
        leave about in the order they came).
        """
        return (self.budget_bytes - self.reserve_bytes) * 4 // 5

    def with_reserve_for(self, largest_bytes: int) -> "DiskSpace":
        """The same with room to copy a segment of `largest_bytes`, as an earlier setting may have left."""
        return replace(self, reserve_bytes=max(self.reserve_bytes, reserve_for(largest_bytes)))


def smallest_segment(identity: DiskIdentity) -> int:
    """One record, with room for a codec that makes it a little longer."""
    record_bytes = max_record_bytes(identity)
    return max(record_bytes + record_bytes // 16 + ENTRY_BYTES + OVERHEAD_BYTES, _LEAST_SEGMENT_BYTES)


def smallest_budget(identity: DiskIdentity) -> int:
    return _LEAST_SEGMENTS_IN_BUDGET * smallest_segment(identity)


def divide(folder: Path, identity: DiskIdentity, budget_bytes: int, segment_bytes: int | None) -> DiskSpace:
    """Raises ConfigurationError when the budget is too small for the blocks."""
    least = smallest_segment(identity)
    if segment_bytes is None:
        segment_bytes = max(least, min(budget_bytes // _SEGMENTS_IN_BUDGET, DEFAULT_MOST_SEGMENT_BYTES))
    if not least <= segment_bytes <= MOST_SEGMENT_BYTES:
        raise ConfigurationError(
            f"segments of {segment_bytes} bytes do not work for blocks of {identity.block_bytes} bytes: "
            f"give {least} to {MOST_SEGMENT_BYTES} bytes."
        )
    if budget_bytes < _LEAST_SEGMENTS_IN_BUDGET * segment_bytes:
        raise ConfigurationError(
            f"a budget of {budget_bytes} bytes is too small for a disk tier in {folder} with segments of "
            f"{segment_bytes} bytes: give --kv-disk-bytes at least {_LEAST_SEGMENTS_IN_BUDGET * segment_bytes}."
        )
    return DiskSpace(budget_bytes, segment_bytes, reserve_for(segment_bytes))


def reserve_for(segment_bytes: int) -> int:
    """Room to copy a segment of that size, into segments that may have to be begun for it."""
    return segment_bytes + 4 * OVERHEAD_BYTES
