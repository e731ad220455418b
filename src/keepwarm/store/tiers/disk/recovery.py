"""Owns recover: from the files of a folder back to an index, after a clean stop, a crash, or damage.

Never reads the bodies of records and never makes room (except by removing files that cannot be ours). Called once
by `DiskTier` when it opens.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from keepwarm.store.tiers.disk.files import Files
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.index import DiskIndex
from keepwarm.store.tiers.disk.segment import (
    TAIL_BYTES,
    Contents,
    load_contents,
    pack_footer,
    pack_segment_header,
    segment_number,
    segment_path,
)


@dataclass(frozen=True, slots=True)
class Recovered:
    next_number: int
    """No segment of this number or a later one has ever been in the folder."""
    last: tuple[int, Contents] | None
    """The newest segment, if it can be gone on with."""
    num_scanned: int
    """Segments without a sound footer; one after each crash."""
    lost_bytes: int
    """Behind torn records and garbage: bytes that were in segments and hold no record that can be found."""


def recover(
    folder: Path, identity: DiskIdentity, index: DiskIndex, files: Files, *, is_read_only: bool
) -> Recovered:
    """Fill `index`, and mend what a crash left. Raises OSError when the folder cannot be listed.

    A segment that cannot be read is left where it is and holds nothing.
    """
    numbers = sorted(filter(None, map(segment_number, files.names(folder))))
    last: tuple[int, Contents] | None = None
    num_scanned = lost_bytes = 0
    for number in numbers:
        contents = _load(folder, number, identity, files, is_read_only=is_read_only)
        last = None
        if contents is None:
            continue
        if not contents.is_sealed:
            num_scanned += 1
            lost_bytes += contents.file_bytes - contents.end
            if not is_read_only and number != numbers[-1]:
                _seal_again(folder, number, contents, identity, files)
        file_bytes = contents.file_bytes
        if not contents.is_sealed and not is_read_only:
            file_bytes = contents.end + len(contents.entries) + TAIL_BYTES
        index.load_segment(number, contents.entries, file_bytes)
        if contents.entries:  # else it could not be read, and must be left alone
            last = number, contents
    index.finish_loading()
    return Recovered((numbers[-1] if numbers else 0) + 1, last, num_scanned, lost_bytes)


def remove_larger(folder: Path, most_bytes: int, files: Files) -> int:
    """Remove segments that a larger budget left and this one cannot compact; returns the size of the largest left.

    Raises OSError.
    """
    largest_bytes = 0
    for name in files.names(folder):
        if segment_number(name) is None:
            continue
        fd = files.open(folder / name, os.O_RDONLY)
        try:
            size = files.size(fd)
        finally:
            files.close(fd)
        if size > most_bytes:
            files.unlink(folder / name)
        else:
            largest_bytes = max(largest_bytes, size)
    return largest_bytes


def _load(
    folder: Path, number: int, identity: DiskIdentity, files: Files, *, is_read_only: bool
) -> Contents | None:
    """None for a segment that is no more, or was removed because nothing in it is ours."""
    path = segment_path(folder, number)
    size = 0
    contents = None
    try:
        fd = files.open(path, os.O_RDONLY)
        try:
            size = files.size(fd)
            contents = load_contents(files, fd, number, identity)
        finally:
            files.close(fd)
        if contents is not None and (contents.entries or is_read_only):
            return contents
        if not is_read_only:
            files.unlink(path)
        return None
    except FileNotFoundError:
        return None
    except OSError:
        # Unreadable, or not removable: it takes part in the budget until compaction can remove it.
        return Contents(b"", 0, size, is_sealed=True)


def _seal_again(folder: Path, number: int, contents: Contents, identity: DiskIdentity, files: Files) -> None:
    """Cut off what is no record and write the footer; a failure costs only the next start a scan."""
    header = pack_segment_header(number, identity)
    footer = pack_footer(header, contents.entries, contents.end)
    with contextlib.suppress(OSError):
        fd = files.open(segment_path(folder, number), os.O_RDWR)
        try:
            files.truncate(fd, contents.end)
            files.write_all(fd, [memoryview(header)], 0)
            files.write_all(fd, [memoryview(footer)], contents.end)
        finally:
            files.close(fd)
