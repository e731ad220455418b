"""The formats and the arithmetic of the disk tier."""

from dataclasses import replace
from pathlib import Path

import pytest

from keepwarm.core.blocks import BlockKey
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.index import (
    DiskIndex,
    location_of,
    offset_of,
    record_bytes_of,
    segment_of,
    stored_bytes_of,
)
from keepwarm.store.tiers.disk.segment import (
    ENTRY,
    ENTRY_BYTES,
    OVERHEAD_BYTES,
    SEGMENT_HEADER_BYTES,
    max_record_bytes,
    pack_segment_header,
    segment_number,
    segment_path,
)
from keepwarm.store.tiers.disk.space import divide, smallest_budget, smallest_segment

IDENTITY = DiskIdentity(model="f", model_name="n", block_size=16, block_bytes=737_280, kv_layout="f32")
A, B = BlockKey(b"a" * 16), BlockKey(b"b" * 16)


def test_a_location_keeps_its_three_parts() -> None:
    location = location_of(123_456_789, (2**31) << 32 | 737_424)
    assert (segment_of(location), offset_of(location), record_bytes_of(location)) == (
        123_456_789,
        2**31,
        737_424,
    )
    assert stored_bytes_of(location) == 737_424 + ENTRY_BYTES


def test_file_names_are_read_back_and_others_are_not_ours() -> None:
    assert segment_number(segment_path(Path("x"), 42).name) == 42
    for name in ("segment-42.kws", "segment-0000000042.kws.bak", "manifest.json", "xsegment-0000000042.kws"):
        assert segment_number(name) is None


def test_a_header_names_segment_and_identity() -> None:
    headers = {
        pack_segment_header(1, IDENTITY),
        pack_segment_header(2, IDENTITY),
        pack_segment_header(1, replace(IDENTITY, model="g")),
        pack_segment_header(1, replace(IDENTITY, block_size=32)),
        pack_segment_header(1, replace(IDENTITY, block_bytes=1)),
        pack_segment_header(1, replace(IDENTITY, kv_layout="f16")),
    }
    assert len(headers) == 6
    assert pack_segment_header(1, replace(IDENTITY, model_name="other")) in headers
    assert all(len(header) == SEGMENT_HEADER_BYTES for header in headers)


@pytest.mark.parametrize("budget_bytes", [smallest_budget(IDENTITY), 10**9, 10**12, 2**60])
def test_a_budget_leaves_room_to_copy_and_a_fifth_of_the_rest_dead(budget_bytes: int) -> None:
    space = divide(Path("x"), IDENTITY, budget_bytes, None)
    assert space.segment_bytes >= max_record_bytes(IDENTITY) + ENTRY_BYTES + OVERHEAD_BYTES
    assert space.reserve_bytes > space.segment_bytes
    assert space.capacity_bytes <= 0.8 * (budget_bytes - space.reserve_bytes)
    assert space.capacity_bytes >= max_record_bytes(IDENTITY), "at least one block may be held"
    if budget_bytes >= 32 * smallest_segment(IDENTITY):
        assert space.capacity_bytes > 0.77 * budget_bytes
        assert space.segment_bytes <= budget_bytes // 32


def loaded() -> DiskIndex:
    index = DiskIndex()
    index.load_segment(1, ENTRY.pack(A, B, 48 << 32 | 100) + ENTRY.pack(B, A, 148 << 32 | 100), 500)
    index.load_segment(2, ENTRY.pack(A, B, 48 << 32 | 100), 300)
    index.finish_loading()
    return index


def test_of_two_records_the_newer_counts_and_the_other_is_dead() -> None:
    index = loaded()
    assert len(index) == 2
    assert index.locate([A, B]) == [location_of(2, 48 << 32 | 100), location_of(1, 148 << 32 | 100)]
    assert index.use_of(1).live_bytes == index.use_of(2).live_bytes == 140
    assert index.live_bytes == 280
    assert index.file_bytes == 800
    assert index.most_dead(set()) == 1
    assert index.most_dead({1}) == 2


def test_a_copied_record_does_not_bring_back_a_dropped_block() -> None:
    index = loaded()
    old = index.locate([A])[0]
    index.add_segment(3)
    new = location_of(3, 48 << 32 | 100)
    index.forget([A])
    index.put([(A, new, old)])
    assert A not in index
    assert index.use_of(3).live_bytes == 0
    assert index.use_of(3).file_bytes == OVERHEAD_BYTES + 140
    index.put([(A, new, None)])
    assert index.locate([A]) == [new]


def test_a_segment_that_goes_takes_its_blocks_along() -> None:
    index = loaded()
    index.remove_segment(2)
    assert index.locate([A, B]) == [None, location_of(1, 148 << 32 | 100)]
    assert (index.live_bytes, index.file_bytes) == (140, 500)
