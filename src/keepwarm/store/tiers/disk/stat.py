"""Owns DiskStat: what a disk tier says about itself, for people, metrics and `keepwarm kv stat`.

Never measures anything: `DiskTier.stat` fills it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStat:
    num_blocks: int
    live_bytes: int
    """Records of these blocks, with their entries in footers."""
    file_bytes: int
    """Segment files, with footers still to be written."""
    budget_bytes: int | None
    """What the files may take; None for a tier opened read-only."""
    num_segments: int
    num_rotten: int
    """Blocks that failed their check since the tier was opened."""
    num_scanned: int
    """Segments that had no sound footer when it was opened: one after a crash."""
    lost_bytes: int
    """Torn records and garbage found when it was opened."""
    copied_bytes: int
    """Records that compaction has copied since it was opened."""

    @property
    def dead_bytes(self) -> int:
        """Dropped blocks and overhead."""
        return self.file_bytes - self.live_bytes
