"""What the fault tests of the disk tier share: blocks that show whose they are, and files that fail on demand."""

import errno
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from blake3 import blake3

from keepwarm.core.blocks import BlockKey
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.record import NO_PARENT, BlockLabel, BlockRead
from keepwarm.store.tiers.disk.appender import FsyncPolicy
from keepwarm.store.tiers.disk.files import Files
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.tier import DiskTier

BLOCK_BYTES = 500
IDENTITY = DiskIdentity(
    model="f1", model_name="small", block_size=4, block_bytes=BLOCK_BYTES, kv_layout="f32/lkhd"
)
BUDGET = 64 * 1024
RAW = RawCodec()


def key_of(number: int) -> BlockKey:
    return BlockKey(blake3(number.to_bytes(8, "little")).digest(length=16))


def label_of(number: int) -> BlockLabel:
    return BlockLabel(key_of(number), key_of(number - 1) if number else NO_PARENT, (number, 1, 2, 3))


def block_of(number: int) -> memoryview:
    return memoryview(blake3(key_of(number)).digest(length=BLOCK_BYTES))


def open_tier(
    folder: Path,
    files: Files | None = None,
    *,
    budget_bytes: int = BUDGET,
    segment_bytes: int | None = 4096,
    fsync: FsyncPolicy = FsyncPolicy.SEGMENT,
) -> DiskTier:
    return DiskTier.open(
        folder,
        identity=IDENTITY,
        capacity_bytes=budget_bytes,
        codec=RAW,
        codecs={RAW.codec_id: RAW},
        segment_bytes=segment_bytes,
        fsync=fsync,
        files=files,
    )


def store(tier: DiskTier, numbers: Sequence[int]) -> list[int]:
    return tier.write([label_of(n) for n in numbers], [block_of(n) for n in numbers])


def outcomes(tier: DiskTier, numbers: Sequence[int]) -> dict[int, BlockRead]:
    """Reads `numbers` and checks that what is called OK is the right block."""
    outs = [memoryview(bytearray(BLOCK_BYTES)) for _ in numbers]
    found = tier.read([key_of(n) for n in numbers], outs)
    for number, out, outcome in zip(numbers, outs, found, strict=True):
        assert outcome is not BlockRead.OK or out == block_of(number), f"wrong bytes for block {number}"
    return dict(zip(numbers, found, strict=True))


def readable(tier: DiskTier, numbers: Sequence[int]) -> set[int]:
    return {number for number, outcome in outcomes(tier, numbers).items() if outcome is BlockRead.OK}


def segment_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*.kws"))


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in segment_files(folder))


class UnsyncedFiles(Files):
    """Spares the tests the wait for the medium: SIGKILL leaves the page cache alone."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class FailingFiles(UnsyncedFiles):
    """Raises `error_number` from the operations named in `failing`, writing half of what it is given first."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.error_number = errno.ENOSPC

    def _maybe_fail(self, operation: str) -> None:
        if operation in self.failing:
            raise OSError(self.error_number, os.strerror(self.error_number))

    def open(self, path: Path, flags: int) -> int:
        self._maybe_fail("create" if flags & os.O_CREAT else "open")
        return super().open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe_fail("read")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if "write" in self.failing:
            data = b"".join(buffers)
            super().pwritev(fd, [memoryview(data[: len(data) // 2])], offset)
        self._maybe_fail("write")
        return super().pwritev(fd, buffers, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._maybe_fail("truncate")
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._maybe_fail("sync")
        super().sync(fd)

    def unlink(self, path: Path) -> None:
        self._maybe_fail("unlink")
        super().unlink(path)


class KillingFiles(Files):
    """Kills this process in the middle of the `countdown`-th operation that changes anything."""

    def __init__(self, random: Random, countdown: int) -> None:
        self._random = random
        self._countdown = countdown

    def _change(self, operation: Callable[[], None]) -> None:
        """Kill before or after the operation when its time has come."""
        self._countdown -= 1
        if self._countdown == 0 and self._random.random() < 0.5:
            _die()
        operation()
        if self._countdown == 0:
            _die()

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            self._change(lambda: None)
        return super().open(path, flags)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._countdown -= 1
        if self._countdown == 0:
            data = b"".join(buffers)
            super().pwritev(fd, [memoryview(data[: self._random.randint(0, len(data))])], offset)
            _die()
        return super().pwritev(fd, buffers, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._change(lambda: Files.truncate(self, fd, size))

    def sync(self, fd: int) -> None:
        self._change(lambda: None)

    def unlink(self, path: Path) -> None:
        self._change(lambda: Files.unlink(self, path))

    def rename(self, source: Path, target: Path) -> None:
        self._change(lambda: Files.rename(self, source, target))

    def sync_folder(self, folder: Path) -> None:
        self._change(lambda: None)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_rig_notices_a_wrong_block(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([label_of(1)], [block_of(2)])
    try:
        outcomes(tier, [1])
    except AssertionError:
        return
    finally:
        tier.close()
    raise RuntimeError("a wrong block went unnoticed")
