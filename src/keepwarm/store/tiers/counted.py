"""Owns CountedBlockStore: moves that cost time and bytes but carry none.

Never stores content. Used with scripted and simulated executors, where only sizes matter.
"""

from collections.abc import Mapping

from keepwarm.core.blocks import Tier
from keepwarm.store.block import Move
from keepwarm.store.tiers.base import MoveOutcome


class CountedBlockStore:
    """Block sizes and bandwidths instead of memory."""

    def __init__(
        self, *, block_bytes: int, num_slots: Mapping[Tier, int], bytes_per_s: float = float("inf")
    ) -> None:
        self._block_bytes = block_bytes
        self._num_slots = dict(num_slots)
        self._bytes_per_s = bytes_per_s

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def num_slots(self, tier: Tier) -> int:
        return self._num_slots.get(tier, 0)

    def execute(self, move: Move) -> MoveOutcome:
        num_bytes = len(move.keys) * self._block_bytes
        return MoveOutcome(num_bytes=num_bytes, duration_s=num_bytes / self._bytes_per_s)

    def close(self) -> None:
        """Nothing is held."""
