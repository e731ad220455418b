"""Owns the format of a segment file: header, records one after the other, and the footer that seals it.

Never decides what is written where. Called by `appender` (writes), `recovery` and `compaction` (read).

Layout, little-endian: header (SEGMENT_HEADER_BYTES); records (`store.record`); and once sealed the footer: one
entry per record (ENTRY_BYTES: key, parent, position) and a tail (TAIL_BYTES). A position is
`offset << 32 | record bytes`. Header and footer carry checksums; a footer's also covers the header that the
segment must have, so it vouches for a segment whose header is damaged.
"""

import enum
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from keepwarm.store.record import HEADER_BYTES, TOKEN_BYTES, read_header
from keepwarm.store.tiers.disk.files import Files
from keepwarm.store.tiers.disk.identity import FORMAT_VERSION, DiskIdentity

ENTRY = struct.Struct("<16s16sQ")
ENTRY_BYTES = ENTRY.size
LENGTH_MASK = 0xFFFFFFFF
MOST_SEGMENT_BYTES = 1 << 31
"""Offsets have 32 bits."""

_HEADER = struct.Struct("<4sHxxQ16s")
_TAIL = struct.Struct("<4sIQ")
_CHECKSUM_BYTES = 16
SEGMENT_HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES
TAIL_BYTES = _TAIL.size + _CHECKSUM_BYTES
OVERHEAD_BYTES = SEGMENT_HEADER_BYTES + TAIL_BYTES
"""What a segment takes beside records and their entries."""

_HEADER_MAGIC = b"KWSG"
_TAIL_MAGIC = b"KWSF"
_NAME = re.compile(r"segment-(\d{10})\.kws")
_SCAN_WINDOW_BYTES = 65536


class HeaderState(enum.Enum):
    OURS = "ours"
    FOREIGN = "foreign"
    """A sound header of another segment, identity or version."""
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Contents:
    """What a segment file was found to hold."""

    entries: bytes
    """Packed ENTRY after ENTRY, in the order of writing."""
    end: int
    """Offset after the last whole record."""
    file_bytes: int
    is_sealed: bool
    """Whether a sound footer follows."""


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:010d}.kws"


def segment_number(name: str) -> int | None:
    """The number in a segment's file name; None for other files."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def pack_segment_header(number: int, identity: DiskIdentity) -> bytes:
    checked = _HEADER.pack(_HEADER_MAGIC, FORMAT_VERSION, number, identity.digest())
    return checked + _checksum(checked)


def pack_footer(header: bytes, entries: bytes | bytearray, end: int) -> bytes:
    """Footer of a segment with this header, whose last record ends at offset `end`."""
    tail = _TAIL.pack(_TAIL_MAGIC, len(entries) // ENTRY_BYTES, end)
    return bytes(entries) + tail + _checksum(header, entries, tail)


def load_contents(files: Files, fd: int, number: int, identity: DiskIdentity) -> Contents | None:
    """What the segment holds, by its footer or else by scanning; None when it is not ours. Raises OSError."""
    header = pack_segment_header(number, identity)
    size = files.size(fd)
    entries = _read_footer(files, fd, size, header)
    if entries is not None:
        end = size - TAIL_BYTES - len(entries)
        return Contents(entries, end, size, is_sealed=True)
    if _header_state(bytes(files.read_bytes(fd, SEGMENT_HEADER_BYTES, 0)), header) is HeaderState.FOREIGN:
        return None
    entries, end = _scan(files, fd, size, identity)
    return Contents(entries, end, size, is_sealed=False)


def _header_state(found: bytes, expected: bytes) -> HeaderState:
    if found == expected:
        return HeaderState.OURS
    checked = found[: _HEADER.size]
    if len(found) == SEGMENT_HEADER_BYTES and found[_HEADER.size :] == _checksum(checked):
        return HeaderState.FOREIGN
    return HeaderState.DAMAGED


def _read_footer(files: Files, fd: int, size: int, header: bytes) -> bytes | None:
    if size < OVERHEAD_BYTES:
        return None
    tail = bytes(files.read_bytes(fd, TAIL_BYTES, size - TAIL_BYTES))
    if len(tail) < TAIL_BYTES:
        return None
    magic, num_entries, end = _TAIL.unpack_from(tail)
    entries_bytes = num_entries * ENTRY_BYTES
    if magic != _TAIL_MAGIC or end + entries_bytes + TAIL_BYTES != size:
        return None
    entries = bytes(files.read_bytes(fd, entries_bytes, end))
    if tail[_TAIL.size :] != _checksum(header, entries, tail[: _TAIL.size]):
        return None
    return entries


def _scan(files: Files, fd: int, size: int, identity: DiskIdentity) -> tuple[bytes, int]:
    """Entries of the whole records from the front to the first that is torn or not a record, and its offset.

    Trusts lengths only as far as the next header bears them out; bodies are checked when they are read.
    """
    window_bytes = _SCAN_WINDOW_BYTES if identity.block_bytes < _SCAN_WINDOW_BYTES else HEADER_BYTES
    entries = bytearray()
    offset = SEGMENT_HEADER_BYTES
    window, window_start = memoryview(b""), 0
    while offset + HEADER_BYTES <= size:
        if offset + HEADER_BYTES > window_start + window.nbytes:
            window, window_start = memoryview(files.read_bytes(fd, window_bytes, offset)), offset
        header = read_header(window[offset - window_start :])
        if header is None or header.block_bytes != identity.block_bytes:
            break
        if header.num_tokens > identity.block_size or offset + header.record_bytes > size:
            break
        label = header.label
        entries += ENTRY.pack(label.key, label.parent, offset << 32 | header.record_bytes)
        offset += header.record_bytes
    return bytes(entries), offset


def max_record_bytes(identity: DiskIdentity) -> int:
    """Size of a block's record when it is stored as it is, with its tokens."""
    return HEADER_BYTES + identity.block_size * TOKEN_BYTES + identity.block_bytes


def _checksum(*parts: bytes | bytearray) -> bytes:
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest(length=_CHECKSUM_BYTES)
