"""Owns ZstdCodec: byte planes split first, then each plane through zstd. Lossless.

Never trusts what it unpacks: a frame that would grow beyond its plane is refused before it does. Built by
`codecs.registry`, called by `store.record`.

Neighbouring numbers of a KV page share their high bytes (sign and exponent) and nothing else, so plane i
holds byte i of every element. Packed form, little-endian: element width (1 byte) and block size (4 bytes), which
together give the planes' lengths, so decoding needs no configuration; then for each plane its packed length
(4 bytes) and its bytes: one zstd frame, or the plane as it is when the length is that of the plane itself.
"""

import struct
import sys

from keepwarm.core.errors import ConfigurationError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_HEAD = struct.Struct("<BI")
_LENGTH = struct.Struct("<I")
_MAX_ELEMENT_BYTES = 255
_MIN_LEVEL, _MAX_LEVEL = 1, 22
_MIN_WINDOW_LOG = 10
"""Least that the format knows."""


class ZstdCodec:
    """Safe to use from several threads at once."""

    name = "zstd"
    codec_id = 1
    is_lossy = False

    def __init__(self, *, level: int = 1, element_bytes: int = 4) -> None:
        """`level`: zstd's, 1 (fast) to 22. `element_bytes`: width of the numbers in a block, for encoding only.

        Raises ConfigurationError for values out of range.
        """
        if not _MIN_LEVEL <= level <= _MAX_LEVEL:
            raise ConfigurationError(f"zstd has levels {_MIN_LEVEL} to {_MAX_LEVEL}; got {level}. Use 1.")
        if not 1 <= element_bytes <= _MAX_ELEMENT_BYTES:
            raise ConfigurationError(
                f"numbers of a block have 1 to {_MAX_ELEMENT_BYTES} bytes; got {element_bytes}. "
                "Use 4 for float32."
            )
        self._level = level
        self._element_bytes = element_bytes

    def encode(self, block: memoryview) -> bytes:
        width = self._element_bytes
        # Slicing bytes with a step is ten times faster than slicing a memoryview, which pays for the copy.
        flat = bytes(block)
        parts = [_HEAD.pack(width, len(flat))]
        for first in range(width):
            plane = flat[first::width]
            packed = zstd.compress(plane, self._level)
            if len(packed) >= len(plane):
                packed = plane
            parts += (_LENGTH.pack(len(packed)), packed)
        return b"".join(parts)

    def decode(self, packed: memoryview, out: memoryview) -> None:
        if packed.nbytes < _HEAD.size:
            raise ValueError(f"a packed block has at least {_HEAD.size} bytes; this one has {packed.nbytes}")
        width, block_bytes = _HEAD.unpack_from(packed)
        if not width or block_bytes != out.nbytes:
            raise ValueError(
                f"the record holds {block_bytes} bytes in elements of {width}, the block has {out.nbytes}"
            )
        block = bytearray(block_bytes)
        offset = _HEAD.size
        for first in range(width):
            if offset + _LENGTH.size > packed.nbytes:
                raise ValueError(f"the packed block ends before plane {first} of {width}")
            (length,) = _LENGTH.unpack_from(packed, offset)
            offset += _LENGTH.size
            if offset + length > packed.nbytes:
                raise ValueError(
                    f"plane {first} has {length} bytes, but only {packed.nbytes - offset} are left"
                )
            num_bytes = len(range(first, block_bytes, width))
            block[first::width] = _plane(packed[offset : offset + length], num_bytes)
            offset += length
        if offset != packed.nbytes:
            raise ValueError(f"{packed.nbytes - offset} bytes follow the last plane")
        out[:] = block


def _plane(packed: memoryview, num_bytes: int) -> bytes | memoryview:
    """The `num_bytes` of a plane. Raises ValueError when `packed` holds fewer or more, before it grows larger."""
    if packed.nbytes == num_bytes:
        return packed
    # Without the limit a forged header makes the decoder allocate a window of 128 MiB.
    window_log = max(_MIN_WINDOW_LOG, num_bytes.bit_length())
    decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window_log})
    try:
        # One byte more than is wanted: whoever has more than that is found out without being unpacked.
        plane = decoder.decompress(packed, max_length=num_bytes + 1)
    except zstd.ZstdError as error:
        raise ValueError(f"a plane is not a zstd frame: {error}") from error
    if len(plane) != num_bytes or not decoder.eof or decoder.unused_data:
        raise ValueError(f"a plane of {num_bytes} bytes unpacks to another size or goes on after its end")
    return plane
