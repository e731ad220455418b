"""Owns Appender: the one segment that grows, from its creation over each batch of records to its footer.

Never decides what is stored and never removes anything. Called by `DiskTier` and `compaction`, under the tier's
writing lock. What was written stands in the page cache, so it survives the death of the process at any point;
what survives a power loss is the FsyncPolicy's to say.
"""

import contextlib
import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keepwarm.core.blocks import BlockKey
from keepwarm.store.tiers.disk.files import Files
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.index import DiskIndex, Location, location_of
from keepwarm.store.tiers.disk.segment import (
    ENTRY,
    ENTRY_BYTES,
    SEGMENT_HEADER_BYTES,
    TAIL_BYTES,
    Contents,
    pack_footer,
    pack_segment_header,
    segment_path,
)


class FsyncPolicy(enum.StrEnum):
    """What a power loss may cost. A lost or half-written record is a miss, never a wrong block, under each."""

    NEVER = "never"
    """Whatever the system had not written out by itself; on most systems half a minute's writes."""
    SEGMENT = "segment"
    """The segment that was growing: a segment is synced when it is sealed and when the tier is closed."""
    BATCH = "batch"
    """Nothing for which `write` had returned."""


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """A record to be written: `parts` one after the other."""

    key: BlockKey
    parent: BlockKey
    parts: tuple[memoryview, ...]
    num_bytes: int
    copied_from: Location | None = None
    """Where compaction read it."""


@dataclass(slots=True)
class _Growing:
    number: int
    fd: int
    end: int
    """Where the next record goes."""
    entries: bytearray = field(default_factory=bytearray)


class Appender:
    def __init__(
        self,
        folder: Path,
        identity: DiskIdentity,
        index: DiskIndex,
        files: Files,
        *,
        segment_bytes: int,
        fsync: FsyncPolicy,
        next_number: int,
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._index = index
        self._files = files
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._next_number = next_number
        self._growing: _Growing | None = None

    @property
    def growing_number(self) -> int | None:
        """The segment that is not sealed."""
        return self._growing.number if self._growing else None

    def growing_entries(self, number: int) -> bytes | None:
        """Entries of segment `number`, which has no footer yet; None when it is another one that grows."""
        growing = self._growing
        return bytes(growing.entries) if growing is not None and growing.number == number else None

    def resume(self, number: int, contents: Contents) -> None:
        """Go on with the newest segment if it was left with room, or unsealed. Raises OSError."""
        if contents.is_sealed and contents.end > self._segment_bytes // 2:
            return
        fd = self._files.open(segment_path(self._folder, number), os.O_RDWR)
        try:
            self._files.truncate(fd, contents.end)
            header = pack_segment_header(number, self._identity)
            self._files.write_all(fd, [memoryview(header)], 0)
        except OSError:
            self._files.close(fd)
            raise
        self._growing = _Growing(number, fd, contents.end, bytearray(contents.entries))

    def append(self, records: Sequence[PackedRecord]) -> None:
        """Write records, into new segments as they fill up, and enter them in the index as they are written.

        The caller has made room for them in the budget. Raises OSError; then the first few may have been written.
        """
        first = 0
        while first < len(records):
            growing = self._with_room_for(records[first])
            last, num_bytes = first, growing.end + len(growing.entries) + TAIL_BYTES
            while last < len(records):
                num_bytes += records[last].num_bytes + ENTRY_BYTES
                if num_bytes > self._segment_bytes and last > first:
                    break
                last += 1
            self._write(growing, records[first:last])
            first = last

    def end_batch(self) -> None:
        """A call of `write` ends. Raises OSError."""
        if self._fsync is FsyncPolicy.BATCH:
            self.sync()

    def sync(self) -> None:
        """Return when what was appended is on the medium, unless the policy is NEVER. Raises OSError."""
        if self._growing is not None and self._fsync is not FsyncPolicy.NEVER:
            self._files.sync(self._growing.fd)

    def seal(self) -> None:
        """Write the footer; the next record starts a new segment. Raises OSError; the segment is then still
        growing if the footer could not be written."""
        growing = self._growing
        if growing is None:
            return
        header = pack_segment_header(growing.number, self._identity)
        footer = pack_footer(header, growing.entries, growing.end)
        # Bytes of a failed write may lie behind the end; a footer counts only at the end of the file.
        self._files.truncate(growing.fd, growing.end)
        self._write_or_cut(growing, [memoryview(footer)])
        self._growing = None
        try:
            if self._fsync is not FsyncPolicy.NEVER:
                self._files.sync(growing.fd)
                self._files.sync_folder(self._folder)
        finally:
            self._files.close(growing.fd)

    def close(self) -> None:
        """Seal what grows. Raises OSError; the file is closed in any case."""
        try:
            self.seal()
        finally:
            if self._growing is not None:
                fd, self._growing = self._growing.fd, None
                with contextlib.suppress(OSError):
                    self._files.close(fd)

    def _with_room_for(self, record: PackedRecord) -> _Growing:
        if self._growing is not None:
            growing = self._growing
            after = growing.end + len(growing.entries) + TAIL_BYTES + record.num_bytes + ENTRY_BYTES
            if after <= self._segment_bytes or not growing.entries:
                return growing
            self.seal()
        number = self._next_number
        path = segment_path(self._folder, number)
        fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        # Never used again, whatever happens: a name means one content.
        self._next_number += 1
        try:
            self._files.write_all(fd, [memoryview(pack_segment_header(number, self._identity))], 0)
        except OSError:
            self._files.close(fd)
            with contextlib.suppress(OSError):
                self._files.unlink(path)
            raise
        self._index.add_segment(number)
        self._growing = _Growing(number, fd, SEGMENT_HEADER_BYTES)
        return self._growing

    def _write(self, growing: _Growing, records: Sequence[PackedRecord]) -> None:
        start = growing.end
        self._write_or_cut(growing, [part for record in records for part in record.parts])
        placed: list[tuple[BlockKey, Location, Location | None]] = []
        for record in records:
            position = growing.end << 32 | record.num_bytes
            growing.entries += ENTRY.pack(record.key, record.parent, position)
            growing.end += record.num_bytes
            placed.append((record.key, location_of(growing.number, position), record.copied_from))
        self._index.put(placed)
        self._files.start_writing_out(growing.fd, start, growing.end - start)

    def _write_or_cut(self, growing: _Growing, buffers: Sequence[memoryview]) -> None:
        try:
            self._files.write_all(growing.fd, buffers, growing.end)
        except OSError:
            # If even this fails, the next write starts at the same offset and covers what is there.
            with contextlib.suppress(OSError):
                self._files.truncate(growing.fd, growing.end)
            raise
