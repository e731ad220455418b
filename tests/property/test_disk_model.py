"""The disk tier against a plain dict, through random programs: contents, order, sizes, and the byte budget."""

import tempfile
from pathlib import Path
from random import Random

from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import TierFull
from keepwarm.store.codecs.base import Codec
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.codecs.zstd import ZstdCodec
from keepwarm.store.record import HEADER_BYTES, NO_PARENT, BlockLabel, BlockRead
from keepwarm.store.tiers.disk.appender import FsyncPolicy
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.segment import ENTRY_BYTES
from keepwarm.store.tiers.disk.tier import DiskTier

BLOCK_BYTES = 400
IDENTITY = DiskIdentity(
    model="f", model_name="n", block_size=4, block_bytes=BLOCK_BYTES, kv_layout="f32/lkhd"
)
BUDGET = 20_000
CODECS: dict[int, Codec] = {RawCodec.codec_id: RawCodec(), ZstdCodec.codec_id: ZstdCodec()}
MOST_STORED_BYTES = HEADER_BYTES + 16 + BLOCK_BYTES + ENTRY_BYTES
NUMBERS = st.integers(0, 60)


def key_of(number: int) -> BlockKey:
    return BlockKey(blake3(b"%d" % number).digest(length=16))


def label_of(number: int) -> BlockLabel:
    tokens = (number, 2, 3, 4) if number % 2 else ()
    return BlockLabel(key_of(number), key_of(number - 1) if number else NO_PARENT, tokens)


def block_of(number: int) -> memoryview:
    """Every third one packs well."""
    whole = blake3(b"%d" % number).digest(length=BLOCK_BYTES)
    return memoryview(whole if number % 3 else whole[:4] * (BLOCK_BYTES // 4))


class DiskMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name) / "tier"
        self.sizes: dict[int, int] = {}
        """What the tier must hold."""
        self.dropped: set[int] = set()
        """What may come back with a restart."""

    @initialize(packs=st.booleans())
    def start(self, packs: bool) -> None:
        self.codec: Codec = ZstdCodec() if packs else RawCodec()
        self.tier = self.open()

    def open(self) -> DiskTier:
        return DiskTier.open(
            self.folder,
            identity=IDENTITY,
            capacity_bytes=BUDGET,
            codec=self.codec,
            codecs=CODECS,
            segment_bytes=4096,
            fsync=FsyncPolicy.NEVER,
        )

    @rule(numbers=st.lists(NUMBERS, max_size=12))
    def write(self, numbers: list[int]) -> None:
        """As the manager does: what it holds never exceeds what the tier says that it can."""
        new = {number for number in numbers if number not in self.sizes}
        most_bytes = sum(self.sizes.values()) + len(new) * MOST_STORED_BYTES
        if most_bytes > self.tier.capacity_bytes:
            return
        sizes = self.tier.write([label_of(n) for n in numbers], [block_of(n) for n in numbers])
        for number, size in zip(numbers, sizes, strict=True):
            assert self.sizes.setdefault(number, size) == size
        self.dropped -= set(numbers)

    @rule(first=st.integers(100, 10_000), count=st.integers(20, 40))
    def write_too_much(self, first: int, count: int) -> None:
        numbers = range(first * 100, first * 100 + count)
        try:
            self.tier.write([label_of(n) for n in numbers], [block_of(n) for n in numbers])
        except TierFull:
            pass
        else:
            self.tier.drop([key_of(n) for n in numbers])
        self.dropped |= set(numbers)

    @rule(numbers=st.lists(NUMBERS, max_size=12))
    def drop(self, numbers: list[int]) -> None:
        self.tier.drop([key_of(n) for n in numbers])
        for number in numbers:
            if self.sizes.pop(number, None) is not None:
                self.dropped.add(number)

    @rule(numbers=st.lists(NUMBERS, max_size=30))
    def read(self, numbers: list[int]) -> None:
        outs = [memoryview(bytearray(BLOCK_BYTES)) for _ in numbers]
        found = self.tier.read([key_of(n) for n in numbers], outs)
        for number, out, outcome in zip(numbers, outs, found, strict=True):
            assert outcome is (BlockRead.OK if number in self.sizes else BlockRead.MISSING)
            assert outcome is BlockRead.MISSING or out == block_of(number)

    @rule(first=NUMBERS, count=st.integers(1, 10))
    def count_leading(self, first: int, count: int) -> None:
        numbers = list(range(first, first + count))
        expected = next((at for at, number in enumerate(numbers) if number not in self.sizes), count)
        assert self.tier.num_leading([key_of(n) for n in numbers]) == expected

    @rule()
    def compact(self) -> None:
        before = self.tier.stat()
        won_bytes = self.tier.compact()
        assert self.tier.stat().file_bytes == before.file_bytes - won_bytes
        assert won_bytes >= 0
        assert self.tier.stat().num_blocks == before.num_blocks

    @rule()
    def compacting_twice_wins_nothing(self) -> None:
        self.tier.compact()
        assert self.tier.compact() == 0

    @precondition(lambda self: self.sizes)
    @rule()
    def verify_and_export(self) -> None:
        assert dict(self.tier.verify()) == {key_of(n): BlockRead.OK for n in self.sizes}
        with tempfile.TemporaryDirectory() as other:
            copy = DiskTier.open(
                Path(other), identity=IDENTITY, capacity_bytes=4 * BUDGET, codec=self.codec, codecs=CODECS
            )
            assert copy.add_records(record for _, record in self.tier.records()) == len(self.sizes)
            assert {entry.key for entry in copy.entries()} == {key_of(n) for n in self.sizes}
            copy.close()

    @rule(cleanly=st.booleans())
    def restart(self, cleanly: bool) -> None:
        """Without closing it is as if the process had died, except for the lock, which is passed on here."""
        if not cleanly and self.tier._lock_fd is not None:
            self.tier._files.close(self.tier._lock_fd)
            self.tier._lock_fd = None
        else:
            self.tier.close()
        self.tier = self.open()
        there = {entry.key: entry for entry in self.tier.entries()}
        numbers = {number for number in self.sizes | dict.fromkeys(self.dropped) if key_of(number) in there}
        assert len(numbers) == len(there), "blocks that nobody stored"
        lost = self.sizes.keys() - numbers
        assert not lost or self.tier.stat().live_bytes + MOST_STORED_BYTES > self.tier.capacity_bytes
        for number, size in self.sizes.items():
            assert number in lost or there[key_of(number)].stored_bytes == size
        self.sizes = {number: there[key_of(number)].stored_bytes for number in numbers}
        self.dropped -= numbers
        # The manager's blocks are those of small numbers here; the others are dropped again.
        others = [number for number in self.sizes if number > 60]
        self.tier.drop([key_of(number) for number in others])
        for number in others:
            self.sizes.pop(number)
            self.dropped.add(number)

    @invariant()
    def the_budget_holds_and_the_books_are_right(self) -> None:
        if not hasattr(self, "tier"):
            return
        on_disk = sum(path.stat().st_size for path in self.folder.glob("segment-*.kws"))
        stat = self.tier.stat()
        assert on_disk <= stat.file_bytes <= BUDGET
        assert stat.num_blocks == len(self.sizes)
        assert stat.live_bytes == sum(self.sizes.values())
        assert stat.num_rotten == 0

    @invariant()
    def entries_are_what_it_holds(self) -> None:
        if not hasattr(self, "tier"):
            return
        entries = list(self.tier.entries())
        assert sorted(entry.key for entry in entries) == sorted(key_of(n) for n in self.sizes)
        parents = {key_of(n): label_of(n).parent for n in self.sizes}
        assert all(parents[entry.key] == entry.parent for entry in entries)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
        self.scratch.cleanup()


TestDiskModel = DiskMachine.TestCase
TestDiskModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_tier_at_its_capacity_takes_one_for_each_dropped_forever(tmp_path: Path, num_seeds: int) -> None:
    """The manager keeps it full and drops at random, the worst order for compaction: there is always room."""
    for seed in range(max(1, num_seeds // 50)):
        random = Random(seed)
        folder = tmp_path / str(seed)
        tier = DiskTier.open(
            folder,
            identity=IDENTITY,
            capacity_bytes=random.choice([4 * 4096, 5 * 4096, 50_000, 200_000]),
            codec=CODECS[0],
            codecs=CODECS,
            segment_bytes=4096,
            fsync=FsyncPolicy.NEVER,
        )
        budget_bytes = tier.stat().budget_bytes
        assert budget_bytes is not None
        held: list[int] = []
        held_bytes = written_bytes = 0
        for number in range(100, 800):
            while held_bytes + MOST_STORED_BYTES > tier.capacity_bytes:
                gone = held.pop(random.randrange(len(held)))
                tier.drop([key_of(gone)])
                held_bytes -= MOST_STORED_BYTES - (0 if gone % 2 else 16)
            (size,) = tier.write([label_of(number)], [block_of(number)])
            held.append(number)
            held_bytes += size
            written_bytes += size
            stat = tier.stat()
            on_disk = sum(path.stat().st_size for path in folder.glob("segment-*.kws"))
            assert on_disk <= stat.file_bytes <= budget_bytes
            assert stat.live_bytes == held_bytes
        assert tier.stat().copied_bytes <= 4 * written_bytes
        tier.close()
