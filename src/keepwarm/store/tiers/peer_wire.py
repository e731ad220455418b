"""Owns the messages between a worker's PeerServer and other workers' PeerTiers.

Never does I/O. Used by `tiers.peer` on both sides.

A message is a header (magic, kind, length of the body; little-endian) and a body. A client opens with HELLO
and gets WELCOME or REFUSED; then each COUNT gets COUNTED, and each FETCH one RECORD or MISSING per key, in order.
"""

import enum
import struct
from collections.abc import Sequence

from keepwarm.core.blocks import KEY_BYTES, BlockKey
from keepwarm.store.tiers.connections import Garbled

_HEADER = struct.Struct("<4sII")
_MAGIC = b"KWP1"
_NUMBER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
MAX_COUNT_KEYS = 65536
MAX_FETCH_KEYS = 1024
MAX_TEXT_BYTES = 1024


class PeerMessage(enum.IntEnum):
    HELLO = 1
    """Block bytes (4 bytes), then the namespace: both sides must agree, or blocks would be misread."""
    WELCOME = 2
    REFUSED = 3
    """Why, in plain words."""
    COUNT = 4
    """Keys: how many of them, from the first on, do you hold?"""
    COUNTED = 5
    FETCH = 6
    """Keys."""
    RECORD = 7
    MISSING = 8


def pack_message(kind: PeerMessage, body: bytes = b"") -> bytes:
    return pack_header(kind, len(body)) + body


def pack_header(kind: PeerMessage, body_bytes: int) -> bytes:
    return _HEADER.pack(_MAGIC, kind, body_bytes)


def unpack_header(header: bytes) -> tuple[PeerMessage, int]:
    """Kind and length of the body. Raises Garbled."""
    magic, kind, body_bytes = _HEADER.unpack(header)
    if magic != _MAGIC or kind not in PeerMessage.__members__.values():
        raise Garbled(f"{header!r} is no message of a peer")
    return PeerMessage(kind), body_bytes


def pack_hello(block_bytes: int, namespace: str) -> bytes:
    return pack_message(PeerMessage.HELLO, _NUMBER.pack(block_bytes) + namespace.encode())


def unpack_hello(body: bytes) -> tuple[int, str]:
    try:
        return unpack_number(body[: _NUMBER.size]), body[_NUMBER.size :].decode()
    except UnicodeDecodeError as error:
        raise Garbled("a namespace that is no text") from error


def pack_number(number: int) -> bytes:
    return _NUMBER.pack(number)


def unpack_number(body: bytes) -> int:
    if len(body) != _NUMBER.size:
        raise Garbled(f"{len(body)} bytes where a number was due")
    return int(_NUMBER.unpack(body)[0])


def pack_keys(kind: PeerMessage, keys: Sequence[BlockKey]) -> bytes:
    return pack_message(kind, b"".join(keys))


def unpack_keys(body: bytes) -> list[BlockKey]:
    if len(body) % KEY_BYTES:
        raise Garbled(f"{len(body)} bytes are no whole number of keys")
    return [BlockKey(body[start : start + KEY_BYTES]) for start in range(0, len(body), KEY_BYTES)]
