"""What every BlockStore must do, run against real memory and against counted bytes."""

import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.errors import TierUnavailable
from keepwarm.core.ids import MoveId
from keepwarm.store.block import Move, MoveReason, Probe
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.codecs.registry import LOSSLESS
from keepwarm.store.record import NO_PARENT, BlockLabel, BlockRead
from keepwarm.store.tiers.base import BlockStore, TaskOutcome, TierFacts
from keepwarm.store.tiers.counted import CountedBlockStore
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.tier import DiskTier
from keepwarm.store.tiers.keyed import KeyedTier, StoredEntry
from keepwarm.store.tiers.local import TASK_BATCH, LocalBlockStore
from keepwarm.testing.memory import ArenaMemory

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


# ---------------------------------------------------------------------- tasks on slow tiers

NUM_SLOTS = 3 * TASK_BATCH
DISK_BYTES = 32 << 20


def disk_tier(folder: Path, block_bytes: int = BLOCK_BYTES) -> DiskTier:
    identity = DiskIdentity(
        model="m", model_name="m", block_size=4, block_bytes=block_bytes, kv_layout="plain"
    )
    return DiskTier.open(
        folder, identity=identity, capacity_bytes=DISK_BYTES, codec=RawCodec(), codecs=LOSSLESS
    )


class FailingTier:
    """A disk tier that fails as a whole from its `num_calls`-th reading or writing on."""

    name, is_writable, capacity_bytes = "failing", True, None

    def __init__(self, tier: DiskTier, num_calls: int, new_error: Callable[[], Exception]) -> None:
        self._tier = tier
        self._num_left = num_calls
        self._new_error = new_error

    def _count(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise self._new_error()

    def entries(self) -> Iterable[StoredEntry]:
        return self._tier.entries()

    def num_leading(self, keys: Sequence[BlockKey]) -> int:
        self._count()
        return self._tier.num_leading(keys)

    def read(self, keys: Sequence[BlockKey], outs: Sequence[memoryview]) -> list[BlockRead]:
        self._count()
        return self._tier.read(keys, outs)

    def write(self, labels: Sequence[BlockLabel], blocks: Sequence[memoryview]) -> list[int]:
        self._count()
        return self._tier.write(labels, blocks)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self._tier.drop(keys)

    def close(self) -> None:
        self._tier.close()


def counted_with_disk(folder: Path) -> BlockStore:
    return CountedBlockStore(
        block_bytes=BLOCK_BYTES,
        num_slots={Tier.DEVICE: 4, Tier.HOST: NUM_SLOTS},
        slow_tiers={Tier.DISK: TierFacts("disk", True, DISK_BYTES)},
        slow_bytes_per_s=1e6,
    )


def local_with_disk(folder: Path, tier: KeyedTier | None = None) -> LocalBlockStore:
    return LocalBlockStore(
        device=PlainMemory(4),
        host_bytes=NUM_SLOTS * BLOCK_BYTES,
        keyed={Tier.DISK: tier or disk_tier(folder)},
    )


@pytest.fixture
def real(tmp_path: Path) -> Iterator[LocalBlockStore]:
    store = local_with_disk(tmp_path)
    yield store
    store.close()


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(2, "big") * 8)


def content(number: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    return number.to_bytes(2, "big") * (block_bytes // 2)


def save(numbers: Sequence[int], *, slots: Sequence[int] | None = None, drops: Sequence[int] = ()) -> Move:
    """A move to disk of a chain of blocks, from host slots with the same numbers."""
    parents = [NO_PARENT, *(key(number) for number in numbers)]
    return Move(
        move_id=MoveId(1),
        keys=tuple(key(number) for number in numbers),
        source=Tier.HOST,
        target=Tier.DISK,
        source_slots=tuple(slots if slots is not None else numbers),
        target_slots=(),
        reason=MoveReason.SAVE,
        labels=tuple(
            BlockLabel(key(number), parent, (number,) * 4)
            for number, parent in zip(numbers, parents, strict=False)
        ),
        drops=tuple(key(number) for number in drops),
    )


def fetch(numbers: Sequence[int], *, slots: Sequence[int] | None = None) -> Move:
    return Move(
        move_id=MoveId(2),
        keys=tuple(key(number) for number in numbers),
        source=Tier.DISK,
        target=Tier.HOST,
        source_slots=(),
        target_slots=tuple(slots if slots is not None else range(len(numbers))),
        reason=MoveReason.FETCH,
    )


def probe(numbers: Sequence[int]) -> Probe:
    keys = tuple(key(number) for number in numbers)
    return Probe(move_id=MoveId(3), tier=Tier.DISK, keys=keys, parent=None, deadline_s=1.0)


def never() -> bool:
    return False


def after(num_looks: int) -> Callable[[], bool]:
    """Cancelled from the `num_looks`-th look on."""
    looks = iter(range(10**6))
    return lambda: next(looks) >= num_looks


def fill(store: LocalBlockStore, numbers: Iterable[int]) -> None:
    for number in numbers:
        store.host.slot(number)[:] = content(number, store.block_bytes)


def failing_at(
    folder: Path, num_calls: int, new_error: Callable[[], Exception], *, stored: Sequence[int] = ()
) -> LocalBlockStore:
    tier = disk_tier(folder)
    tier.write(save(stored).labels, [memoryview(content(number)) for number in stored])
    return local_with_disk(folder, FailingTier(tier, num_calls, new_error))


@pytest.mark.parametrize("build", [counted_with_disk, local_with_disk])
def test_what_was_saved_is_found_and_fetched(build: Callable[[Path], BlockStore], tmp_path: Path) -> None:
    store = build(tmp_path)
    assert {tier: facts.is_writable for tier, facts in store.slow_tiers.items()} == {Tier.DISK: True}
    assert list(store.entries(Tier.DISK)) == []
    assert store.execute_task(probe(range(4)), never).num_leading == 0
    saved = store.execute_task(save([0, 1, 2]), never)
    assert (saved.error, len(saved.stored_bytes), saved.reads) == (None, 3, ())
    assert saved.num_bytes == sum(saved.stored_bytes) >= 3 * BLOCK_BYTES
    assert saved.duration_s > 0
    assert store.execute_task(probe([0, 1, 2, 3]), never).num_leading == 3
    assert store.execute_task(probe([9, 1, 2]), never).num_leading == 0
    fetched = store.execute_task(fetch([0, 9, 2]), never)
    assert fetched.reads == (BlockRead.OK, BlockRead.MISSING, BlockRead.OK)
    assert (fetched.error, fetched.stored_bytes) == (None, ())
    assert fetched.num_bytes == 2 * BLOCK_BYTES
    assert [(entry.key, entry.parent) for entry in store.entries(Tier.DISK)] == [
        (key(0), NO_PARENT),
        (key(1), key(0)),
        (key(2), key(1)),
    ]
    store.close()


@pytest.mark.parametrize("build", [counted_with_disk, local_with_disk])
def test_drops_come_before_what_is_stored(build: Callable[[Path], BlockStore], tmp_path: Path) -> None:
    store = build(tmp_path)
    store.execute_task(save([0, 1, 2]), never)
    store.execute_task(save([3, 1], drops=[1, 2, 44]), never)
    reads = store.execute_task(fetch([0, 1, 2, 3]), never).reads
    assert reads == (BlockRead.OK, BlockRead.OK, BlockRead.MISSING, BlockRead.OK), "1 was stored again"
    store.close()


def test_blocks_come_back_to_the_byte_over_several_batches(real: LocalBlockStore) -> None:
    numbers = list(range(2 * TASK_BATCH + 3))
    fill(real, numbers)
    assert len(real.execute_task(save(numbers), never).stored_bytes) == len(numbers)
    fill(real, [0] * NUM_SLOTS)
    slots = [NUM_SLOTS - 1 - number for number in numbers]
    outcome = real.execute_task(fetch(numbers, slots=slots), never)
    assert outcome.reads == (BlockRead.OK,) * len(numbers)
    assert outcome.num_bytes == len(numbers) * BLOCK_BYTES
    assert [bytes(real.host.slot(slot)) for slot in slots] == [content(number) for number in numbers]


def test_another_store_over_the_same_folder_goes_on(tmp_path: Path) -> None:
    first = local_with_disk(tmp_path)
    fill(first, range(5))
    first.execute_task(save(range(5)), never)
    first.close()
    second = local_with_disk(tmp_path)
    assert [entry.key for entry in second.entries(Tier.DISK)] == [key(number) for number in range(5)]
    assert second.execute_task(fetch([4], slots=[7]), never).reads == (BlockRead.OK,)
    assert bytes(second.host.slot(7)) == content(4)
    second.close()


def test_a_rotten_block_is_named_and_its_neighbours_are_read(real: LocalBlockStore, tmp_path: Path) -> None:
    numbers = [1, 2, 3]
    fill(real, numbers)
    real.execute_task(save(numbers), never)
    (segment,) = [path for path in tmp_path.rglob("*") if path.is_file() and content(2) in path.read_bytes()]
    data = bytearray(segment.read_bytes())
    data[data.index(content(2)) + 30] ^= 1
    with segment.open("r+b") as file:
        file.write(data)
    outcome = real.execute_task(fetch(numbers), never)
    assert outcome.reads == (BlockRead.OK, BlockRead.ROTTEN, BlockRead.OK)
    assert outcome.error is None
    assert [bytes(real.host.slot(slot)) for slot in (0, 2)] == [content(1), content(3)]


def test_a_cancelled_fetch_stops_between_batches(real: LocalBlockStore) -> None:
    numbers = list(range(NUM_SLOTS))
    fill(real, numbers)
    real.execute_task(save(numbers), never)
    outcome = real.execute_task(fetch(numbers), after(2))
    assert outcome.reads == (BlockRead.OK,) * (2 * TASK_BATCH)
    assert outcome.error is None
    assert real.execute_task(fetch(numbers), after(0)).reads == ()
    assert len(real.execute_task(save([*range(TASK_BATCH), *numbers]), after(1)).stored_bytes) == TASK_BATCH


def check_kept(outcome: TaskOutcome, message: str) -> None:
    assert outcome.error is not None
    assert message in outcome.error
    assert len(outcome.reads) + len(outcome.stored_bytes) == 2 * TASK_BATCH


@pytest.mark.parametrize(
    ("new_error", "message"),
    [
        (lambda: TierUnavailable("the cable is out"), "the cable is out"),
        (lambda: RuntimeError("a bug"), "the tier failed: RuntimeError: a bug"),
    ],
)
def test_what_came_before_an_error_counts(
    tmp_path: Path, new_error: Callable[[], Exception], message: str
) -> None:
    numbers = list(range(NUM_SLOTS))
    store = failing_at(tmp_path / "read", 2, new_error, stored=numbers)
    check_kept(store.execute_task(fetch(numbers), never), message)
    kept = [bytes(store.host.slot(slot)) for slot in range(2 * TASK_BATCH)]
    assert kept == [content(number) for number in range(2 * TASK_BATCH)]
    store.close()
    store = failing_at(tmp_path / "write", 2, new_error)
    fill(store, numbers)
    check_kept(store.execute_task(save(numbers), never), message)
    assert len(list(store.entries(Tier.DISK))) == 2 * TASK_BATCH
    store.close()
    store = failing_at(tmp_path / "probe", 0, new_error)
    outcome = store.execute_task(probe([1]), never)
    assert message in (outcome.error or "")
    assert outcome.num_leading == 0
    store.close()


def test_a_tier_that_is_not_there_is_an_error_too(real: LocalBlockStore) -> None:
    asked = Probe(move_id=MoveId(1), tier=Tier.REMOTE, keys=(key(1),), parent=None, deadline_s=1.0)
    assert real.execute_task(asked, never).error is not None


def test_a_slow_move_needs_little_memory_beside_the_arena(tmp_path: Path) -> None:
    block_bytes, num_blocks = 256 << 10, 64
    numbers = list(range(num_blocks))
    store = LocalBlockStore(
        device=ArenaMemory(num_blocks=1, block_bytes=block_bytes),
        host_bytes=num_blocks * block_bytes,
        keyed={Tier.DISK: disk_tier(tmp_path, block_bytes)},
    )
    fill(store, numbers)
    moves = [save(numbers), fetch(numbers)]
    peaks: list[int] = []
    for move in moves:
        tracemalloc.start()
        outcome = store.execute_task(move, never)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(outcome.reads) + len(outcome.stored_bytes) == num_blocks
    assert max(peaks) < 4 * block_bytes
    assert bytes(store.host.slot(63)) == content(63, block_bytes)
    store.close()
