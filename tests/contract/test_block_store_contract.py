"""What every BlockStore must do, run against real memory and against counted bytes."""

from collections.abc import Callable, Sequence

import pytest

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.ids import MoveId
from keepwarm.store.block import Move, MoveReason
from keepwarm.store.tiers.base import BlockStore
from keepwarm.store.tiers.counted import CountedBlockStore
from keepwarm.store.tiers.local import LocalBlockStore

BLOCK_BYTES = 64


class PlainMemory:
    """Device memory without a device."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [bytearray(BLOCK_BYTES) for _ in range(num_blocks)]
        self.is_broken = False

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES

    def read_blocks(self, slots: Sequence[int], outs: Sequence[memoryview]) -> None:
        if self.is_broken:
            raise MemoryError("the device is gone")
        for slot, out in zip(slots, outs, strict=True):
            out[:] = self.blocks[slot]

    def write_blocks(self, slots: Sequence[int], sources: Sequence[memoryview]) -> None:
        for slot, source in zip(slots, sources, strict=True):
            self.blocks[slot][:] = source


def counted() -> BlockStore:
    slots = {Tier.DEVICE: 4, Tier.HOST: 6}
    return CountedBlockStore(block_bytes=BLOCK_BYTES, num_slots=slots, bytes_per_s=1024)


def local() -> BlockStore:
    return LocalBlockStore(device=PlainMemory(4), host_bytes=6 * BLOCK_BYTES + 5)


def move(source: Tier, target: Tier, source_slots: tuple[int, ...], target_slots: tuple[int, ...]) -> Move:
    return Move(
        move_id=MoveId(1),
        keys=tuple(BlockKey(bytes([slot])) for slot in source_slots),
        source=source,
        target=target,
        source_slots=source_slots,
        target_slots=target_slots,
        reason=MoveReason.DEMOTE,
    )


@pytest.mark.parametrize("build", [counted, local])
def test_says_its_sizes_and_counts_bytes(build: Callable[[], BlockStore]) -> None:
    store = build()
    assert store.block_bytes == BLOCK_BYTES
    assert [store.num_slots(tier) for tier in Tier] == [4, 6, 0, 0]
    outcome = store.execute(move(Tier.DEVICE, Tier.HOST, (0, 1), (5, 0)))
    assert (outcome.num_bytes, outcome.error) == (2 * BLOCK_BYTES, None)
    assert outcome.duration_s > 0
    assert store.execute(move(Tier.HOST, Tier.DEVICE, (5,), (3,))).num_bytes == BLOCK_BYTES
    store.close()


def test_bytes_survive_the_round_trip_exactly() -> None:
    memory = PlainMemory(4)
    store = LocalBlockStore(device=memory, host_bytes=6 * BLOCK_BYTES)
    first, second = bytes(range(64)), bytes(reversed(range(64)))
    memory.blocks[0][:], memory.blocks[1][:] = first, second
    store.execute(move(Tier.DEVICE, Tier.HOST, (0, 1), (5, 0)))
    memory.blocks[0][:] = memory.blocks[1][:] = bytes(64)
    store.execute(move(Tier.HOST, Tier.DEVICE, (0, 5), (2, 3)))
    assert (bytes(memory.blocks[2]), bytes(memory.blocks[3])) == (second, first)
    store.close()


def test_a_failed_copy_is_reported_not_raised() -> None:
    memory = PlainMemory(4)
    store = LocalBlockStore(device=memory, host_bytes=6 * BLOCK_BYTES)
    memory.is_broken = True
    outcome = store.execute(move(Tier.DEVICE, Tier.HOST, (0,), (0,)))
    assert outcome.error is not None
    assert "the device is gone" in outcome.error
    assert "no way" in (store.execute(move(Tier.DEVICE, Tier.DISK, (0,), (0,))).error or "")
    store.close()


def test_without_a_host_budget_there_is_no_host_tier() -> None:
    store = LocalBlockStore(device=PlainMemory(4), host_bytes=BLOCK_BYTES - 1)
    assert store.num_slots(Tier.HOST) == 0
    store.close()
