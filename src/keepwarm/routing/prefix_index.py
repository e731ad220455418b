"""Owns PrefixIndex: which worker holds which blocks on which tier, as far as block events have told.

Never trusted for correctness: a wrong entry costs time, not tokens, since workers look again. Fed by the
router, read by routing policies.
"""

from collections.abc import Sequence

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.events import AllBlocksCleared, BlockEvent, BlocksRemoved, BlocksStored
from keepwarm.core.ids import WorkerId


class PrefixIndex:
    def __init__(self) -> None:
        self._tiers: dict[WorkerId, dict[BlockKey, set[Tier]]] = {}

    def apply(self, worker_id: WorkerId, event: BlockEvent) -> None:
        held = self._tiers.setdefault(worker_id, {})
        match event:
            case BlocksStored(keys, _, tier):
                for key in keys:
                    held.setdefault(key, set()).add(tier)
            case BlocksRemoved(keys, tier):
                for key in keys:
                    tiers = held.get(key, set())
                    tiers.discard(tier)
                    if not tiers:
                        held.pop(key, None)
            case AllBlocksCleared():
                held.clear()

    def num_warm_blocks(self, worker_id: WorkerId, keys: Sequence[BlockKey]) -> dict[Tier, int]:
        """Blocks of the longest held prefix of `keys`, by the fastest tier that holds each."""
        held = self._tiers.get(worker_id, {})
        counts: dict[Tier, int] = {}
        for key in keys:
            tiers = held.get(key)
            if not tiers:
                break
            fastest = next(tier for tier in Tier if tier in tiers)
            counts[fastest] = counts.get(fastest, 0) + 1
        return counts
