"""The medium of a disk tier fails as a whole: full, read-only, broken, gone. Reads go on, and it recovers."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from test_disk_rig import (
    BLOCK_BYTES,
    BUDGET,
    FailingFiles,
    UnsyncedFiles,
    bytes_on_disk,
    key_of,
    open_tier,
    outcomes,
    readable,
    segment_files,
    store,
)

from keepwarm.core.errors import ConfigurationError, TierFull, TierUnavailable
from keepwarm.store.record import HEADER_BYTES, BlockRead
from keepwarm.store.tiers.disk.appender import FsyncPolicy
from keepwarm.store.tiers.disk.files import Files
from keepwarm.store.tiers.disk.segment import SEGMENT_HEADER_BYTES

WRITING = {"write", "create", "truncate", "sync", "unlink"}


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("failing", [{"write"}, {"create"}, {"write", "truncate"}, {"sync"}, WRITING])
def test_a_medium_that_takes_no_more_still_reads_and_recovers(
    tmp_path: Path, error_number: int, failing: set[str]
) -> None:
    files = FailingFiles()
    files.error_number = error_number
    tier = open_tier(tmp_path, files)
    store(tier, range(8))
    files.failing = failing
    with pytest.raises(TierFull, match=r"(?s)disk tier in .*stays readable"):
        store(tier, range(100, 120))
    assert readable(tier, range(8)) == set(range(8))
    assert readable(tier, range(100, 120)) == set(), "a failed write stores nothing"
    assert bytes_on_disk(tmp_path) <= BUDGET
    files.failing = set()
    store(tier, range(100, 120))
    expected = {*range(8), *range(100, 120)}
    assert readable(tier, range(120)) == expected
    tier.close()
    tier = open_tier(tmp_path)
    assert readable(tier, range(120)) == expected
    assert bytes_on_disk(tmp_path) <= BUDGET
    tier.close()


def test_what_a_failed_write_left_behind_does_not_hide_the_footer(tmp_path: Path) -> None:
    files = FailingFiles()
    tier = open_tier(tmp_path, files)
    store(tier, [1])
    files.failing = {"write", "truncate"}
    with pytest.raises(TierFull):
        store(tier, [2, 3, 4])
    files.failing = set()
    tier.close()
    tier = open_tier(tmp_path)
    assert tier.stat().num_scanned == 0
    assert readable(tier, range(5)) == {1}
    tier.close()


def test_other_errors_of_writing_are_unavailable(tmp_path: Path) -> None:
    files = FailingFiles()
    files.error_number = errno.EIO
    tier = open_tier(tmp_path, files)
    files.failing = {"write"}
    with pytest.raises(TierUnavailable) as raised:
        store(tier, [1])
    assert not isinstance(raised.value, TierFull)
    files.failing = set()
    store(tier, [1])
    assert readable(tier, [1]) == {1}
    tier.close()


@pytest.mark.parametrize("failing", ["read", "open"])
def test_a_medium_that_cannot_be_read_is_unavailable_and_recovers(tmp_path: Path, failing: str) -> None:
    files = FailingFiles()
    files.error_number = errno.EIO
    tier = open_tier(tmp_path, files)
    store(tier, range(8))
    files.failing = {failing}
    with pytest.raises(TierUnavailable, match="Check the disk"):
        outcomes(tier, range(8))
    files.failing = set()
    assert len(readable(tier, range(8))) >= 7
    tier.close()


class BadSpot(Files):
    """Cannot read the bytes at `offset` of any file."""

    offset: int | None = None

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.offset is not None and offset <= self.offset < offset + sum(b.nbytes for b in buffers):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)


def test_a_bad_spot_costs_one_block(tmp_path: Path) -> None:
    files = BadSpot()
    tier = open_tier(tmp_path, files)
    store(tier, range(5))
    files.offset = 1500
    found = outcomes(tier, range(5))
    assert sorted(outcome.value for outcome in found.values()) == ["ok", "ok", "ok", "ok", "rotten"]
    assert len(readable(tier, range(5))) == 4
    tier.close()


def test_a_bad_spot_under_a_lonely_block_takes_the_tier_down_once(tmp_path: Path) -> None:
    files = BadSpot()
    tier = open_tier(tmp_path, files)
    store(tier, [1])
    files.offset = 100
    with pytest.raises(TierUnavailable):
        outcomes(tier, [1])
    assert outcomes(tier, [1]) == {1: BlockRead.MISSING}
    tier.close()


@pytest.mark.parametrize("bad", [0, 2, 4])
def test_a_bad_spot_costs_no_other_block_of_the_batch(tmp_path: Path, bad: int) -> None:
    """Every other block is dropped, so that each is read by itself."""
    files = BadSpot()
    tier = open_tier(tmp_path, files)
    store(tier, range(5))
    tier.drop([key_of(1), key_of(3)])
    record_bytes = HEADER_BYTES + 16 + BLOCK_BYTES
    files.offset = SEGMENT_HEADER_BYTES + bad * record_bytes + 300
    with pytest.raises(TierUnavailable):
        outcomes(tier, [0, 2, 4])
    assert readable(tier, [0, 2, 4]) == {0, 2, 4} - {bad}
    tier.close()


def test_room_is_won_from_unwanted_segments_when_the_medium_is_full(tmp_path: Path) -> None:
    files = FailingFiles()
    tier = open_tier(tmp_path, files)
    store(tier, range(40))
    num_before = len(segment_files(tmp_path))
    tier.drop([key_of(number) for number in range(30)])
    files.failing = {"write"}
    with pytest.raises(TierFull):
        store(tier, [100])
    assert len(segment_files(tmp_path)) < num_before
    files.failing = set()
    assert readable(tier, range(40)) == set(range(30, 40))
    tier.close()


def test_a_folder_that_vanishes_is_missing_blocks_and_a_clear_error(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    tier = open_tier(folder)
    store(tier, range(8))
    folder.rename(tmp_path / "elsewhere")
    assert set(outcomes(tier, range(8)).values()) == {BlockRead.MISSING}
    with pytest.raises(TierUnavailable):
        store(tier, range(100, 120))
    tier.close()


@pytest.mark.parametrize("error_number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_locked_is_refused(tmp_path: Path, error_number: int) -> None:
    open_tier(tmp_path).close()
    files = FailingFiles()
    files.error_number = error_number
    files.failing = {"create"}
    with pytest.raises(ConfigurationError, match="--kv-disk"):
        open_tier(tmp_path, files)


def test_a_medium_that_became_read_only_serves_after_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, range(30))
    tier.close()
    files = FailingFiles()
    files.error_number = errno.EROFS
    files.failing = {"write", "truncate", "sync", "unlink"}
    tier = open_tier(tmp_path, files)
    assert readable(tier, range(30)) == set(range(30))
    with pytest.raises(TierFull):
        store(tier, [100])
    assert readable(tier, range(30)) == set(range(30))
    tier.close()


def test_random_failures_never_cost_a_stored_block(tmp_path: Path, num_seeds: int) -> None:
    for seed in range(num_seeds // 4):
        random = Random(seed)
        folder = tmp_path / str(seed)
        files = FailingFiles()
        tier = open_tier(folder, files, fsync=random.choice(list(FsyncPolicy)))
        held: set[int] = set()
        for step in range(30):
            files.failing = {name for name in WRITING if random.random() < 0.2}
            files.error_number = random.choice([errno.ENOSPC, errno.EIO])
            batch = range(step * 10, step * 10 + random.randint(1, 9))
            try:
                store(tier, batch)
                held.update(batch)
            except TierUnavailable:
                assert readable(tier, batch) == set()
            while len(held) > 60:
                gone = random.choice(sorted(held))
                tier.drop([key_of(gone)])
                held.remove(gone)
            assert bytes_on_disk(folder) <= BUDGET
        files.failing = set()
        assert readable(tier, range(300)) == held, f"seed {seed}"
        tier.close()
        tier = open_tier(folder, UnsyncedFiles())
        missing = held - readable(tier, range(300))
        assert not missing or tier.stat().live_bytes + 700 > tier.capacity_bytes, f"seed {seed}"
        assert BlockRead.ROTTEN not in outcomes(tier, range(300)).values()
        tier.close()


class UnreadableAtFirst(UnsyncedFiles):
    """One file cannot be read until told otherwise."""

    def __init__(self, path: Path) -> None:
        self.path: Path | None = path
        self._paths: dict[int, Path] = {}

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._paths.get(fd) == self.path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)


def test_the_newest_segment_is_left_alone_when_it_cannot_be_read_at_a_start(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, range(4))
    tier.close()
    files = UnreadableAtFirst(segment_files(tmp_path)[-1])
    tier = open_tier(tmp_path, files)
    assert readable(tier, range(4)) == set()
    files.path = None
    store(tier, range(10, 14))
    tier.close()
    tier = open_tier(tmp_path)
    assert readable(tier, range(20)) == {*range(4), *range(10, 14)}
    tier.close()
