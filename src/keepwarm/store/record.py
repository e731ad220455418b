"""Owns the record: one block as disk, remote and peer tiers store it, so that no reader has to trust them.

Never does I/O and never chooses a codec. Called by every keyed tier (`store.tiers.keyed`).

Layout, little-endian: header (HEADER_BYTES), token ids (4 bytes each), packed block. The checksum covers
all other header fields, the token ids and the packed block; the key is among them, so a sound record under
another key is as useless as a rotten one.
"""

import array
import enum
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from keepwarm.core.blocks import KEY_BYTES, BlockKey
from keepwarm.store.codecs.base import Codec

FORMAT_VERSION = 1
MAGIC = b"KWB1"
_CHECKED = struct.Struct("<4sHBxIIHxx16s16s")
"""magic, version, codec id, block bytes, packed bytes, number of tokens, key, parent."""
_CHECKSUM_BYTES = 16
HEADER_BYTES = _CHECKED.size + _CHECKSUM_BYTES
TOKEN_BYTES = 4

NO_PARENT = BlockKey(bytes(KEY_BYTES))
"""Parent of the first block of a chain."""


class BlockRead(enum.Enum):
    """What became of reading one block."""

    OK = "ok"
    MISSING = "missing"
    """The tier does not hold it, or not any more."""
    ROTTEN = "rotten"
    """The tier gave bytes that are not this block: torn, flipped, another key, another size or version."""


@dataclass(frozen=True, slots=True)
class BlockLabel:
    """What a record says about its block beside the bytes."""

    key: BlockKey
    parent: BlockKey
    """Key of the block before it, NO_PARENT for the first."""
    token_ids: tuple[int, ...] = ()
    """The block's tokens, for audits; empty when the writer did not know them."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    label: BlockLabel
    """Without token ids: they follow the header."""
    codec_id: int
    block_bytes: int
    packed_bytes: int
    num_tokens: int
    checksum: bytes

    @property
    def body_bytes(self) -> int:
        """Bytes that follow the header."""
        return self.num_tokens * TOKEN_BYTES + self.packed_bytes

    @property
    def record_bytes(self) -> int:
        return HEADER_BYTES + self.body_bytes


def pack_record(label: BlockLabel, block: memoryview, codec: Codec) -> tuple[bytes, bytes | memoryview]:
    """The record in two parts, to be written one after the other: header with tokens, and packed block.

    The second part may be `block` itself, so `block` must not change before both are written.
    """
    packed = codec.encode(block)
    tokens = _token_bytes(label.token_ids)
    checked = _CHECKED.pack(
        MAGIC,
        FORMAT_VERSION,
        codec.codec_id,
        block.nbytes,
        memoryview(packed).nbytes,
        len(label.token_ids),
        label.key,
        label.parent,
    )
    return checked + _checksum(checked, tokens, packed) + tokens, packed


def read_header(data: bytes | memoryview) -> RecordHeader | None:
    """The header at the start of `data`, unchecked but well-formed; None when there is none."""
    if memoryview(data).nbytes < HEADER_BYTES:
        return None
    magic, version, codec_id, block_bytes, packed_bytes, num_tokens, key, parent = _CHECKED.unpack_from(data)
    if magic != MAGIC or version != FORMAT_VERSION:
        return None
    return RecordHeader(
        label=BlockLabel(BlockKey(key), BlockKey(parent)),
        codec_id=codec_id,
        block_bytes=block_bytes,
        packed_bytes=packed_bytes,
        num_tokens=num_tokens,
        checksum=bytes(memoryview(data)[_CHECKED.size : HEADER_BYTES]),
    )


def unpack_record(
    key: BlockKey, data: bytes | memoryview, out: memoryview, codecs: Mapping[int, Codec]
) -> BlockRead:
    """Check the record in `data` and fill `out` with block `key`. ROTTEN leaves `out` undefined.

    `data` is exactly one record.
    """
    view = memoryview(data)
    header = read_header(view)
    if header is None or header.label.key != key or header.block_bytes != out.nbytes:
        return BlockRead.ROTTEN
    if header.record_bytes != view.nbytes or header.codec_id not in codecs or not is_sound(view):
        return BlockRead.ROTTEN
    try:
        codecs[header.codec_id].decode(view[HEADER_BYTES + header.num_tokens * TOKEN_BYTES :], out)
    except ValueError:
        return BlockRead.ROTTEN
    return BlockRead.OK


def is_sound(data: bytes | memoryview) -> bool:
    """Whether `data` is one whole record with a right checksum."""
    view = memoryview(data)
    header = read_header(view)
    if header is None or header.record_bytes != view.nbytes:
        return False
    return header.checksum == _checksum(view[: _CHECKED.size], view[HEADER_BYTES:])


def tokens_of(data: bytes | memoryview) -> tuple[int, ...]:
    """Token ids of a sound record."""
    header = read_header(data)
    if header is None:
        raise ValueError("not a record")
    tokens = array.array("I", bytes(memoryview(data)[HEADER_BYTES:][: header.num_tokens * TOKEN_BYTES]))
    if sys.byteorder == "big":
        tokens.byteswap()
    return tuple(tokens)


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    packed = array.array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _checksum(*parts: bytes | memoryview) -> bytes:
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest(length=_CHECKSUM_BYTES)
