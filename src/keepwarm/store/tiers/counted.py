"""Owns CountedBlockStore: moves that cost time and bytes but carry none.

Never stores content. Used with scripted and simulated executors, where only sizes matter.
"""

from collections.abc import Callable, Iterable, Mapping

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.store.block import BackgroundTask, Move, Probe
from keepwarm.store.record import BlockRead
from keepwarm.store.tiers.base import MoveOutcome, TaskOutcome, TierFacts
from keepwarm.store.tiers.keyed import StoredEntry


class CountedBlockStore:
    """Block sizes and bandwidths instead of memory; slow tiers remember keys."""

    def __init__(
        self,
        *,
        block_bytes: int,
        num_slots: Mapping[Tier, int],
        bytes_per_s: float = float("inf"),
        slow_tiers: Mapping[Tier, TierFacts] | None = None,
        slow_bytes_per_s: float = float("inf"),
        contents: Mapping[Tier, dict[BlockKey, BlockKey]] | None = None,
    ) -> None:
        """`contents`: parent by key for each slow tier, kept and changed here, so that another store can go on."""
        self._block_bytes = block_bytes
        self._num_slots = dict(num_slots)
        self._bytes_per_s = bytes_per_s
        self._slow_tiers = dict(slow_tiers or {})
        self._slow_bytes_per_s = slow_bytes_per_s
        self._contents = {tier: {} for tier in self._slow_tiers} if contents is None else contents

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def num_slots(self, tier: Tier) -> int:
        return self._num_slots.get(tier, 0)

    @property
    def slow_tiers(self) -> Mapping[Tier, TierFacts]:
        return self._slow_tiers

    def entries(self, tier: Tier) -> Iterable[StoredEntry]:
        if self._slow_tiers[tier].is_shared:
            return ()
        return [StoredEntry(key, parent, self._block_bytes) for key, parent in self._contents[tier].items()]

    def execute(self, move: Move) -> MoveOutcome:
        num_bytes = len(move.keys) * self._block_bytes
        return MoveOutcome(num_bytes=num_bytes, duration_s=num_bytes / self._bytes_per_s)

    def execute_task(self, task: BackgroundTask, is_cancelled: Callable[[], bool]) -> TaskOutcome:
        if isinstance(task, Probe):
            held = self._contents[task.tier]
            num_leading = next((i for i, key in enumerate(task.keys) if key not in held), len(task.keys))
            return TaskOutcome(duration_s=0.0, num_leading=num_leading)
        if task.target is Tier.HOST:
            held = self._contents[task.source]
            reads = tuple(BlockRead.OK if key in held else BlockRead.MISSING for key in task.keys)
            return self._outcome(reads.count(BlockRead.OK), reads=reads)
        held = self._contents[task.target]
        for key in task.drops:
            held.pop(key, None)
        held.update((label.key, label.parent) for label in task.labels)
        return self._outcome(len(task.keys), stored_bytes=(self._block_bytes,) * len(task.keys))

    def _outcome(
        self, num_blocks: int, reads: tuple[BlockRead, ...] = (), stored_bytes: tuple[int, ...] = ()
    ) -> TaskOutcome:
        num_bytes = num_blocks * self._block_bytes
        return TaskOutcome(
            duration_s=num_bytes / self._slow_bytes_per_s,
            num_bytes=num_bytes,
            reads=reads,
            stored_bytes=stored_bytes,
        )

    def close(self) -> None:
        """Nothing is held."""
