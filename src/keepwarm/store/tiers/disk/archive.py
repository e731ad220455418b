"""Owns the archive: records of a disk tier in one portable file. ArchiveWriter makes it, ArchiveReader reads it.

Never opens files and never looks into a tier's folder: both work on a stream, one record in memory at a time.
Called by `keepwarm kv export` and `import`.

Layout, little-endian: magic, version and length of the identity (HEAD); the identity as JSON; a checksum of both.
Then a frame and a record (`store.record`) for each block, parents first; last an end frame with the number of
records, without which the file was cut off. A frame (FRAME_BYTES) carries a checksum of itself, and a record knows
its own length too, so one damaged place costs at most one record.
"""

import dataclasses
import enum
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
from blake3 import blake3

from keepwarm.core.errors import ConfigurationError
from keepwarm.store.codecs.base import Codec
from keepwarm.store.record import HEADER_BYTES, BlockRead, RecordHeader, read_header, unpack_record
from keepwarm.store.tiers.disk.identity import DiskIdentity
from keepwarm.store.tiers.disk.segment import MOST_SEGMENT_BYTES
from keepwarm.store.tiers.disk.space import smallest_segment

ARCHIVE_VERSION = 1
_MAGIC = b"KWARCHIV"
_HEAD = struct.Struct("<8sHxxI")
"""Magic, version, bytes of JSON."""
_CHECKSUM_BYTES = 16
_MOST_JSON_BYTES = 65536

_FRAME = struct.Struct("<4sI")
"""Magic, and the bytes of the record that follows or, in the end frame, the number of records."""
_FRAME_CHECK_BYTES = 8
FRAME_BYTES = _FRAME.size + _FRAME_CHECK_BYTES
_RECORD_FRAME = b"KWRF"
_END_FRAME = b"KWEF"


class ArchiveEnd(enum.Enum):
    """How reading an archive ended."""

    WHOLE = "whole"
    TRUNCATED = "truncated"
    """The file ends before its end frame."""
    DAMAGED = "damaged"
    """From some place on nothing says where records begin, or there are not as many as were written."""


@dataclass(frozen=True, slots=True)
class ArchivedRecord:
    header: RecordHeader
    data: memoryview


class RecordCheck:
    """Whether stored bytes are a block of one kind of folder, down to unpacking it."""

    def __init__(self, identity: DiskIdentity, codecs: Mapping[int, Codec]) -> None:
        self._identity = identity
        self._codecs = codecs
        self._out = memoryview(b"")

    def sound_header(self, record: bytes | bytearray | memoryview) -> RecordHeader | None:
        """The header of a sound record; None for any other bytes."""
        header = read_header(memoryview(record))
        if header is None or header.block_bytes != self._identity.block_bytes:
            return None
        if header.num_tokens > self._identity.block_size:
            return None
        if self._out.nbytes != header.block_bytes:
            self._out = memoryview(bytearray(header.block_bytes))
        outcome = unpack_record(header.label.key, memoryview(record), self._out, self._codecs)
        return header if outcome is BlockRead.OK else None


class ArchiveWriter:
    """Its methods raise what `stream` raises."""

    def __init__(self, stream: BinaryIO, identity: DiskIdentity) -> None:
        self._stream = stream
        self._num_records = 0
        fields = msgspec.json.encode(dataclasses.asdict(identity))
        head = _HEAD.pack(_MAGIC, ARCHIVE_VERSION, len(fields)) + fields
        stream.write(head + _checksum(head, _CHECKSUM_BYTES))

    def add(self, record: memoryview) -> None:
        """Append a sound record. Its parent, if it is to be in the archive, has been added before."""
        self._stream.write(_pack_frame(_RECORD_FRAME, record.nbytes))
        self._stream.write(record)
        self._num_records += 1

    def finish(self) -> None:
        """Say that the archive is whole. The stream stays open."""
        self._stream.write(_pack_frame(_END_FRAME, self._num_records))


class ArchiveReader:
    def __init__(self, stream: BinaryIO, name: str, codecs: Mapping[int, Codec]) -> None:
        """Reads the header; `name` is for messages.

        Raises ConfigurationError when it is not an archive, of another version, or damaged, and OSError.
        """
        self._stream = stream
        self.identity = _read_identity(stream, name)
        self._check = RecordCheck(self.identity, codecs)
        self._most_record_bytes = smallest_segment(self.identity)
        self.end = ArchiveEnd.TRUNCATED
        """Right once `records` is through."""

    def records(self) -> Iterator[ArchivedRecord | None]:
        """The sound records in their order, and None for each rotten one. Raises OSError."""
        num_records = 0
        while len(frame := self._stream.read(FRAME_BYTES)) == FRAME_BYTES:
            magic, number = _FRAME.unpack_from(frame)
            is_sound = frame == _pack_frame(magic, number)
            if is_sound and magic == _END_FRAME:
                self.end = ArchiveEnd.WHOLE if number == num_records else ArchiveEnd.DAMAGED
                return
            start = self._stream.read(HEADER_BYTES)
            if len(start) < HEADER_BYTES:
                return
            header = read_header(start)
            if is_sound and magic == _RECORD_FRAME:
                record_bytes = number
            else:
                record_bytes = header.record_bytes if header is not None else 0
            if not HEADER_BYTES <= record_bytes <= self._most_record_bytes:
                self.end = ArchiveEnd.DAMAGED
                return
            record = start + self._stream.read(record_bytes - HEADER_BYTES)
            if len(record) < record_bytes:
                return
            num_records += 1
            sound = self._check.sound_header(record)
            yield None if sound is None else ArchivedRecord(sound, memoryview(record))


class _Identity(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    model_name: str
    block_size: int
    block_bytes: int
    kv_layout: str


def _read_identity(stream: BinaryIO, name: str) -> DiskIdentity:
    head = stream.read(_HEAD.size)
    if not head:
        raise ConfigurationError(f"{name} is empty. Give a file that `keepwarm kv export` made.")
    if head[: len(_MAGIC)] != _MAGIC:
        raise ConfigurationError(
            f"{name} is not an archive of KV blocks. Give what `keepwarm kv export` made."
        )
    if len(head) < _HEAD.size:
        raise _damaged(name)
    _, version, num_bytes = _HEAD.unpack(head)
    if version != ARCHIVE_VERSION:
        raise ConfigurationError(
            f"{name} is an archive of version {version}; this Keepwarm reads version {ARCHIVE_VERSION}. Export "
            "the blocks again with this Keepwarm."
        )
    if num_bytes > _MOST_JSON_BYTES:
        raise _damaged(name)
    fields = stream.read(num_bytes)
    if stream.read(_CHECKSUM_BYTES) != _checksum(head + fields, _CHECKSUM_BYTES):
        raise _damaged(name)
    try:
        identity = DiskIdentity(**msgspec.structs.asdict(msgspec.json.decode(fields, type=_Identity)))
    except msgspec.DecodeError:
        raise _damaged(name) from None
    if identity.block_size < 1 or identity.block_bytes < 1 or smallest_segment(identity) > MOST_SEGMENT_BYTES:
        raise ConfigurationError(
            f"{name} says that its blocks have {identity.block_size} tokens and {identity.block_bytes} bytes, "
            "which no disk tier can hold. Export the blocks again."
        )
    return identity


def _damaged(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"the header of {name} is damaged or cut off, so nothing says whose blocks it holds. Export them again."
    )


def _pack_frame(magic: bytes, number: int) -> bytes:
    frame = _FRAME.pack(magic, number)
    return frame + _checksum(frame, _FRAME_CHECK_BYTES)


def _checksum(data: bytes, num_bytes: int) -> bytes:
    return blake3(data).digest(length=num_bytes)
