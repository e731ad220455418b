"""One thread reads while another writes, drops and compacts: readers see right blocks or none, never an error."""

import threading
from pathlib import Path

from test_disk_rig import BUDGET, UnsyncedFiles, bytes_on_disk, key_of, open_tier, outcomes, readable, store

from keepwarm.store.record import BlockRead
from keepwarm.store.tiers.disk.tier import DiskTier

KEPT = range(20)


def test_compaction_pulls_no_segment_from_under_a_reader(tmp_path: Path, num_seeds: int) -> None:
    tier = open_tier(tmp_path, UnsyncedFiles())
    store(tier, KEPT)
    is_done = threading.Event()
    problems: list[BaseException] = []
    num_reads = 0

    def read_on() -> None:
        nonlocal num_reads
        try:
            while not is_done.is_set() or num_reads < 3:
                found = outcomes(tier, KEPT)
                assert set(found.values()) == {BlockRead.OK}, found
                outcomes(tier, range(100, 140))
                num_reads += 1
        except BaseException as error:
            problems.append(error)

    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        for round_number in range(num_seeds):
            batch = range(100 + round_number % 40, 105 + round_number % 40)
            store(tier, batch)
            tier.drop([key_of(number) for number in batch])
            # Blocks that are kept move to another segment in each round.
            tier.compact()
            assert bytes_on_disk(tmp_path) <= BUDGET
    finally:
        is_done.set()
        reader.join()
    assert problems == []
    assert tier.stat().copied_bytes > len(KEPT) * 500 * 10
    assert tier.stat().num_rotten == 0
    tier.close()


class UnlinkedBeforeOpen(UnsyncedFiles):
    """Lets the tier compact between a reader's lookup and its opening of the file."""

    tier: DiskTier

    def __init__(self) -> None:
        self.compact_now: list[int] = []
        self.compacting = False

    def open(self, path: Path, flags: int) -> int:
        if self.compact_now and not self.compacting:
            self.compact_now.pop()
            self.compacting = True
            self.tier.drop([key_of(0)])
            self.tier.compact()
            self.compacting = False
        return super().open(path, flags)


def test_a_block_that_moved_after_the_lookup_is_found_again(tmp_path: Path) -> None:
    files = UnlinkedBeforeOpen()
    files.tier = tier = open_tier(tmp_path, files)
    store(tier, range(5))
    files.compact_now.append(1)
    assert readable(tier, range(1, 5)) == {1, 2, 3, 4}
    assert files.compact_now == []
    assert tier.stat().copied_bytes > 0
    tier.close()
