"""Owns ArenaMemory: device memory without a device, for engines that write no KV.

Never computes. Used with the scripted engine, so that its blocks really travel between tiers, and by tests.
"""

from collections.abc import Sequence

from keepwarm.store.tiers.host import HostArena


class ArenaMemory:
    """Blocks in a host arena; memory is taken on first use only."""

    def __init__(self, *, num_blocks: int, block_bytes: int) -> None:
        self._arena = HostArena(num_slots=num_blocks, block_bytes=block_bytes)
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes

    def block(self, slot: int) -> memoryview:
        return self._arena.slot(slot)

    def read_blocks(self, slots: Sequence[int], outs: Sequence[memoryview]) -> None:
        for slot, out in zip(slots, outs, strict=True):
            out[:] = self._arena.slot(slot)

    def write_blocks(self, slots: Sequence[int], sources: Sequence[memoryview]) -> None:
        for slot, source in zip(slots, sources, strict=True):
            self._arena.slot(slot)[:] = source
