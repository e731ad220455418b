"""Any byte of any file of a disk tier is flipped, cut off or lost: never a wrong block, and others survive."""

from pathlib import Path
from random import Random

import pytest
from test_disk_rig import (
    BLOCK_BYTES,
    UnsyncedFiles,
    key_of,
    open_tier,
    outcomes,
    readable,
    segment_files,
    store,
)

from keepwarm.core.errors import ConfigurationError
from keepwarm.store.record import HEADER_BYTES, BlockRead
from keepwarm.store.tiers.disk.identity import MANIFEST_NAME
from keepwarm.store.tiers.disk.segment import (
    ENTRY_BYTES,
    SEGMENT_HEADER_BYTES,
    TAIL_BYTES,
    segment_path,
)
from keepwarm.store.tiers.disk.tier import DiskTier

NUM_BLOCKS = 20
RECORD_BYTES = HEADER_BYTES + 16 + BLOCK_BYTES
PER_SEGMENT = (4096 - SEGMENT_HEADER_BYTES - TAIL_BYTES) // (RECORD_BYTES + ENTRY_BYTES)


def fill(folder: Path) -> None:
    tier = open_tier(folder, UnsyncedFiles())
    store(tier, range(NUM_BLOCKS))
    tier.close()


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def reopened(folder: Path) -> DiskTier:
    return open_tier(folder, UnsyncedFiles())


def cut_footer(path: Path) -> int:
    """As if the process had died before sealing; returns the offset where the records end."""
    data = path.read_bytes()
    num_records = (len(data) - SEGMENT_HEADER_BYTES - TAIL_BYTES) // (RECORD_BYTES + ENTRY_BYTES)
    end = SEGMENT_HEADER_BYTES + num_records * RECORD_BYTES
    path.write_bytes(data[:end])
    return end


def test_a_flipped_bit_anywhere_costs_at_most_its_record(tmp_path: Path, num_seeds: int) -> None:
    """One flipped bit in a sealed segment: the footer or the records, and never both, are hurt."""
    for seed in range(num_seeds):
        random = Random(seed)
        folder = tmp_path / str(seed)
        fill(folder)
        path = random.choice(segment_files(folder))
        flip(path, random.randrange(path.stat().st_size), 1 << random.randrange(8))
        tier = reopened(folder)
        kept = readable(tier, range(NUM_BLOCKS))
        assert len(kept) >= NUM_BLOCKS - 1, f"seed {seed} lost {set(range(NUM_BLOCKS)) - kept}"
        assert tier.stat().num_rotten == NUM_BLOCKS - len(kept)
        assert tier.stat().num_blocks == len(kept)
        tier.close()


@pytest.mark.parametrize(
    ("place", "num_lost"),
    [
        ("segment magic", 0),
        ("segment number", 0),
        ("record magic", 1),
        ("record key", 1),
        ("record checksum", 1),
        ("record tokens", 1),
        ("first byte of the block", 1),
        ("last byte of the block", 1),
        ("footer entry", 0),
        ("footer count", 0),
        ("footer checksum", 0),
    ],
)
def test_a_flipped_byte_in_each_place(tmp_path: Path, place: str, num_lost: int) -> None:
    fill(tmp_path)
    path = segment_files(tmp_path)[0]
    size = path.stat().st_size
    second = SEGMENT_HEADER_BYTES + RECORD_BYTES
    offset = {
        "segment magic": 0,
        "segment number": 8,
        "record magic": second,
        "record key": second + 24,
        "record checksum": second + HEADER_BYTES - 1,
        "record tokens": second + HEADER_BYTES + 3,
        "first byte of the block": second + HEADER_BYTES + 16,
        "last byte of the block": second + RECORD_BYTES - 1,
        "footer entry": size - TAIL_BYTES - 1,
        "footer count": size - TAIL_BYTES + 4,
        "footer checksum": size - 1,
    }[place]
    flip(path, offset)
    tier = reopened(tmp_path)
    found = outcomes(tier, range(NUM_BLOCKS))
    assert list(found.values()).count(BlockRead.ROTTEN) == num_lost
    assert list(found.values()).count(BlockRead.OK) == NUM_BLOCKS - num_lost
    assert outcomes(tier, [1])[1] is (BlockRead.MISSING if num_lost else BlockRead.OK)
    store(tier, [1])
    assert readable(tier, range(NUM_BLOCKS)) == set(range(NUM_BLOCKS)), "a rotten block can be stored again"
    tier.close()


@pytest.mark.parametrize("is_last", [True, False])
def test_a_flipped_byte_in_an_unsealed_segment_never_gives_a_wrong_block(
    tmp_path: Path, is_last: bool, num_seeds: int
) -> None:
    """Here a wrong length may cost the records behind it, in this segment only."""
    num_kept = 0
    for seed in range(num_seeds // 4):
        random = Random(seed)
        folder = tmp_path / str(seed)
        fill(folder)
        path = segment_files(folder)[-1 if is_last else 0]
        end = cut_footer(path)
        flip(path, random.randrange(end), 1 << random.randrange(8))
        tier = reopened(folder)
        kept = readable(tier, range(NUM_BLOCKS))
        assert len(kept) >= NUM_BLOCKS - PER_SEGMENT
        num_kept += len(kept)
        store(tier, range(NUM_BLOCKS))
        assert readable(tier, range(NUM_BLOCKS)) == set(range(NUM_BLOCKS))
        tier.close()
    assert num_kept >= (num_seeds // 4) * (NUM_BLOCKS - PER_SEGMENT / 2)


@pytest.mark.parametrize(
    "left_bytes", [0, 1, 4, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 7, RECORD_BYTES - 1]
)
@pytest.mark.parametrize("filler", [b"", b"\0" * 700, b"\xff" * 700])
def test_a_torn_last_record_is_cut_off(tmp_path: Path, left_bytes: int, filler: bytes) -> None:
    fill(tmp_path)
    path = segment_files(tmp_path)[-1]
    end = cut_footer(path)
    last = NUM_BLOCKS - 1
    path.write_bytes(path.read_bytes()[: end - RECORD_BYTES + left_bytes] + filler)
    tier = reopened(tmp_path)
    assert readable(tier, range(NUM_BLOCKS)) == set(range(last))
    assert tier.stat().num_scanned == 1
    if not (filler and left_bytes > HEADER_BYTES - 16):
        # With a whole header and enough bytes behind it, only reading can tell.
        assert tier.stat().num_rotten == 0
        assert tier.stat().lost_bytes == left_bytes + len(filler)
    store(tier, [last, last + 1])
    tier.close()
    tier = reopened(tmp_path)
    assert readable(tier, range(NUM_BLOCKS + 1)) == set(range(NUM_BLOCKS + 1))
    assert tier.stat().num_scanned == 0
    tier.close()


def test_garbage_in_the_middle_ends_a_scan_and_the_rest_of_the_folder_survives(tmp_path: Path) -> None:
    fill(tmp_path)
    path = segment_files(tmp_path)[0]
    end = cut_footer(path)
    flip(path, SEGMENT_HEADER_BYTES + 2 * RECORD_BYTES)
    tier = reopened(tmp_path)
    assert readable(tier, range(NUM_BLOCKS)) == set(range(NUM_BLOCKS)) - set(range(2, PER_SEGMENT))
    assert tier.stat().lost_bytes == end - SEGMENT_HEADER_BYTES - 2 * RECORD_BYTES
    tier.close()
    assert reopened_scans(tmp_path) == 0, "the segment was sealed again"


def reopened_scans(folder: Path) -> int:
    tier = reopened(folder)
    tier.close()
    return tier.stat().num_scanned


def test_a_flipped_byte_in_the_manifest_is_noticed_or_harmless(tmp_path: Path) -> None:
    fill(tmp_path)
    path = tmp_path / MANIFEST_NAME
    whole = path.read_bytes()
    num_refused = 0
    for offset in range(len(whole)):
        flip(path, offset, 0x01)
        try:
            tier = reopened(tmp_path)
        except ConfigurationError:
            num_refused += 1
        else:
            assert readable(tier, range(NUM_BLOCKS)) == set(range(NUM_BLOCKS))
            tier.close()
        path.write_bytes(whole)
    assert num_refused > len(whole) // 2
    tier = reopened(tmp_path)
    assert readable(tier, range(NUM_BLOCKS)) == set(range(NUM_BLOCKS)), "a refusal touches nothing"
    tier.close()


def test_a_record_under_another_blocks_name_is_rotten(tmp_path: Path) -> None:
    """Two sound records change places: their checksums are right, their keys are not."""
    fill(tmp_path)
    path = segment_files(tmp_path)[0]
    data = bytearray(path.read_bytes())
    one, two, three = (SEGMENT_HEADER_BYTES + index * RECORD_BYTES for index in range(3))
    data[one:two], data[two:three] = data[two:three], data[one:two]
    path.write_bytes(data)
    tier = reopened(tmp_path)
    found = outcomes(tier, range(NUM_BLOCKS))
    assert {number for number, outcome in found.items() if outcome is BlockRead.ROTTEN} == {0, 1}
    tier.close()


def test_a_segment_of_another_model_is_not_read(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    path = segment_files(tmp_path / "a")[0]
    other = segment_path(tmp_path / "a", 77)
    other.write_bytes(path.read_bytes())
    tier = reopened(tmp_path / "a")
    assert tier.stat().num_blocks == NUM_BLOCKS
    assert not other.exists(), "a sound header of another segment: it is no part of this folder"
    tier.close()


def test_files_that_vanish_while_open_are_misses(tmp_path: Path) -> None:
    fill(tmp_path)
    tier = reopened(tmp_path)
    for path in segment_files(tmp_path)[:-1]:
        path.unlink()
    kept = readable(tier, range(NUM_BLOCKS))
    assert 0 < len(kept) <= PER_SEGMENT
    assert BlockRead.ROTTEN not in outcomes(tier, range(NUM_BLOCKS)).values()
    assert tier.num_leading([key_of(0)]) == 0
    store(tier, range(NUM_BLOCKS))
    assert readable(tier, range(NUM_BLOCKS)) == set(range(NUM_BLOCKS))
    tier.close()


def test_a_file_cut_short_while_open_costs_what_was_cut(tmp_path: Path) -> None:
    fill(tmp_path)
    tier = reopened(tmp_path)
    path = segment_files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[: SEGMENT_HEADER_BYTES + RECORD_BYTES + 100])
    found = outcomes(tier, range(NUM_BLOCKS))
    rotten = {number for number, outcome in found.items() if outcome is BlockRead.ROTTEN}
    assert rotten == set(range(1, PER_SEGMENT))
    tier.close()


def test_compaction_leaves_rotten_blocks_behind_and_counts_them(tmp_path: Path) -> None:
    fill(tmp_path)
    tier = reopened(tmp_path)
    flip(segment_files(tmp_path)[0], SEGMENT_HEADER_BYTES + RECORD_BYTES + 200)
    tier.drop([key_of(0)])
    assert tier.compact() > 0
    assert tier.stat().num_rotten == 1
    assert readable(tier, range(NUM_BLOCKS)) == set(range(NUM_BLOCKS)) - {0, 1}
    tier.close()


def test_compaction_of_a_segment_whose_footer_was_damaged_meanwhile_loses_nothing(tmp_path: Path) -> None:
    fill(tmp_path)
    tier = reopened(tmp_path)
    path = segment_files(tmp_path)[0]
    flip(path, path.stat().st_size - 1)
    flip(path, SEGMENT_HEADER_BYTES + RECORD_BYTES)
    tier.drop([key_of(0)])
    assert tier.compact() > 0
    assert readable(tier, range(NUM_BLOCKS)) == set(range(NUM_BLOCKS)) - {0, 1}
    tier.close()
