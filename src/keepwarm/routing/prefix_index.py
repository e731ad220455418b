"""Owns PrefixIndex: which worker holds which blocks on which tier, as far as block events have told.

Never trusted for correctness: a wrong entry costs time, not tokens, since workers look again. Fed by the
router, read by routing policies.
"""

from collections.abc import Sequence

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.events import AllBlocksCleared, BlockEvent, BlocksRemoved, BlocksStored
from keepwarm.core.ids import WorkerId

# The tiers of a block as bits, the fastest lowest: a set per block would cost more than the block's key.
_BIT = {tier: 1 << place for place, tier in enumerate(Tier)}
_FASTEST = {bits: next(tier for tier in Tier if bits & _BIT[tier]) for bits in range(1, 1 << len(Tier))}


class PrefixIndex:
    def __init__(self) -> None:
        self._tiers: dict[WorkerId, dict[BlockKey, int]] = {}
        self._num_blocks: dict[WorkerId, dict[Tier, int]] = {}

    def apply(self, worker_id: WorkerId, event: BlockEvent) -> None:
        held = self._tiers.setdefault(worker_id, {})
        num_blocks = self._num_blocks.setdefault(worker_id, dict.fromkeys(Tier, 0))
        match event:
            case BlocksStored(keys, _, tier):
                bit = _BIT[tier]
                for key in keys:
                    bits = held.get(key, 0)
                    if not bits & bit:
                        held[key] = bits | bit
                        num_blocks[tier] += 1
            case BlocksRemoved(keys, tier):
                bit = _BIT[tier]
                for key in keys:
                    bits = held.get(key, 0)
                    if bits & bit:
                        num_blocks[tier] -= 1
                        if bits == bit:
                            del held[key]
                        else:
                            held[key] = bits ^ bit
            case AllBlocksCleared():
                held.clear()
                num_blocks.update(dict.fromkeys(Tier, 0))

    def num_blocks(self, worker_id: WorkerId, tier: Tier) -> int:
        """Blocks that the worker holds on `tier`."""
        counts = self._num_blocks.get(worker_id)
        return counts[tier] if counts else 0

    def num_warm_blocks(self, worker_id: WorkerId, keys: Sequence[BlockKey]) -> dict[Tier, int]:
        """Blocks of the longest held prefix of `keys`, by the fastest tier that holds each; fastest tier first."""
        held = self._tiers.get(worker_id, {})
        by_bits: dict[int, int] = {}
        for key in keys:
            bits = held.get(key)
            if not bits:
                break
            by_bits[bits] = by_bits.get(bits, 0) + 1
        counts = dict.fromkeys(Tier, 0)
        for bits, count in by_bits.items():
            counts[_FASTEST[bits]] += count
        return {tier: count for tier, count in counts.items() if count}
