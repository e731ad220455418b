"""Owns Compactor: wins back the space of dropped blocks by copying what is still wanted and removing the segment.

Never drops a wanted block, except one that is found rotten. Called by `writing`, under the tier's writing lock.
Readers go on meanwhile: one that has opened the old file reads it to the end, one that comes later finds the
new place.

Budget: ordinary writes leave `reserve_bytes` of it free, which is as much as the largest segment holds, so there
is always room to copy one. The tier is told to hold less than the rest, so a full folder always has dead bytes.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import TierFull
from keepwarm.store.record import is_sound, read_header
from keepwarm.store.tiers.disk.appender import Appender, PackedRecord
from keepwarm.store.tiers.disk.files import Files
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.index import (
    DiskIndex,
    Location,
    offset_of,
    record_bytes_of,
    stored_bytes_of,
)
from keepwarm.store.tiers.disk.segment import OVERHEAD_BYTES, load_contents, segment_path

COPY_BYTES = 8 << 20
"""Most bytes of records in memory while copying, beyond one record."""

_ROLL_BYTES = 2 * OVERHEAD_BYTES
"""Segments that one batch of at most a segment's size may begin."""

_Block = tuple[BlockKey, Location]


class Compactor:
    def __init__(
        self,
        folder: Path,
        identity: DiskIdentity,
        index: DiskIndex,
        appender: Appender,
        files: Files,
        *,
        budget_bytes: int,
        reserve_bytes: int,
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._index = index
        self._appender = appender
        self._files = files
        self._budget_bytes = budget_bytes
        self._writable_bytes = budget_bytes - reserve_bytes
        self._copied_bytes = 0

    @property
    def copied_bytes(self) -> int:
        return self._copied_bytes

    def make_room(self, num_bytes: int) -> None:
        """Compact until records of `num_bytes`, entries included, may be appended. Raises TierFull, OSError."""
        tried: set[int] = set()
        while self._index.file_bytes + num_bytes + _ROLL_BYTES > self._writable_bytes:
            number = self._index.most_dead(tried)
            if number is None:
                raise TierFull(
                    f"disk tier in {self._folder}: {num_bytes} bytes more would exceed its budget of "
                    f"{self._budget_bytes} bytes, and {self._index.live_bytes} bytes of blocks are still wanted. "
                    "Drop blocks, or raise --kv-disk-bytes."
                )
            tried.add(number)
            self._compact(number)

    def compact_all(self) -> int:
        """Compact every segment with dead bytes; returns the bytes won. Raises OSError."""
        before = self._index.file_bytes
        tried: set[int] = set()
        last = max(self._index.segment_numbers(), default=0)
        while (number := self._index.most_dead(tried)) is not None:
            tried.add(number)
            # Segments begun by this very pass have nothing to win.
            if number <= last:
                self._compact(number)
        return before - self._index.file_bytes

    def remove_unwanted(self) -> None:
        """Remove the segments of which nothing is wanted, which needs no room on the medium. Raises OSError."""
        for number in self._index.unwanted_segments():
            if number != self._appender.growing_number:
                self._remove(number)

    def free_reserve(self) -> None:
        """Make the reserve free again at a start: by compacting, else by removing the oldest segments.

        A kill in the middle of compacting leaves blocks twice, which compacting mends without loss; what a larger
        budget left may not be mendable. Raises OSError.
        """
        if self._index.file_bytes <= self._writable_bytes:
            return
        with contextlib.suppress(TierFull):
            self.make_room(0)
        for number in self._index.segment_numbers():
            if self._index.file_bytes <= self._writable_bytes:
                return
            if number == self._appender.growing_number:
                self._appender.seal()
            self._remove(number)

    def _compact(self, number: int) -> None:
        """Copy and remove; leaves the segment alone when the budget has no room for the copy."""
        use = self._index.use_of(number)
        if self._index.file_bytes + use.live_bytes + _ROLL_BYTES > self._budget_bytes and use.live_bytes:
            return
        if number == self._appender.growing_number:
            self._appender.seal()
        if use.live_bytes:
            self._copy(number)
            # The copy must not be less durable than the original.
            self._appender.sync()
        self._remove(number)

    def _copy(self, number: int) -> None:
        try:
            fd = self._files.open(segment_path(self._folder, number), os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            for run in _runs(self._wanted(fd, number)):
                self._copy_run(fd, run)
        finally:
            self._files.close(fd)

    def _wanted(self, fd: int, number: int) -> list[_Block]:
        """What the index still points to in the segment, in the order of its offsets."""
        contents = load_contents(self._files, fd, number, self._identity)
        entries = contents.entries if contents else b""
        wanted = [(key, location) for key, _, location in self._index.wanted_entries(number, entries)]
        if sum(stored_bytes_of(location) for _, location in wanted) >= self._index.use_of(number).live_bytes:
            return wanted
        # The footer was damaged since it was read. The index knows as much, but has to be gone through.
        return self._index.blocks_in(number)

    def _copy_run(self, fd: int, run: list[_Block]) -> None:
        start = offset_of(run[0][1])
        end = offset_of(run[-1][1]) + record_bytes_of(run[-1][1])
        data = memoryview(self._files.read_bytes(fd, end - start, start))
        records: list[PackedRecord] = []
        for key, location in run:
            record = data[offset_of(location) - start :][: record_bytes_of(location)]
            header = read_header(record)
            if header is not None and header.label.key == key and is_sound(record):
                records.append(PackedRecord(key, header.label.parent, (record,), record.nbytes, location))
            else:
                self._index.forget_at([(key, location)], are_rotten=True)
        self._appender.append(records)
        self._copied_bytes += sum(record.num_bytes for record in records)

    def _remove(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(segment_path(self._folder, number))
        self._index.remove_segment(number)


def _runs(blocks: list[_Block]) -> Iterator[list[_Block]]:
    """Neighbours on disk, cut at COPY_BYTES."""
    run: list[_Block] = []
    run_bytes = run_end = 0
    for block in blocks:
        offset, num_bytes = offset_of(block[1]), record_bytes_of(block[1])
        if run and (offset != run_end or run_bytes + num_bytes > COPY_BYTES):
            yield run
            run, run_bytes = [], 0
        run.append(block)
        run_bytes += num_bytes
        run_end = offset + num_bytes
    if run:
        yield run
