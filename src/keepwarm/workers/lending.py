"""Owns HostLender: what a worker lends to its peers from its host tier.

Never sends anything: `store.tiers.peer_server` does, on the same event loop. Built by `compose`.
"""

from collections.abc import Sequence

from keepwarm.core.blocks import BlockKey
from keepwarm.store.manager import BlockManager
from keepwarm.store.record import BlockLabel
from keepwarm.store.tiers.host import HostArena


class HostLender:
    def __init__(self, *, blocks: BlockManager, arena: HostArena) -> None:
        self._blocks = blocks
        self._arena = arena

    def num_leading(self, keys: Sequence[BlockKey]) -> int:
        return next((i for i, key in enumerate(keys) if self._blocks.host_slot(key) is None), len(keys))

    def borrow(self, key: BlockKey) -> tuple[BlockLabel, memoryview] | None:
        """The memory belongs to the block only until the event loop goes on: copy it before."""
        place = self._blocks.host_slot(key)
        if place is None or self._arena.is_closed:
            return None
        slot, parent = place
        return BlockLabel(key, parent), self._arena.slot(slot)
