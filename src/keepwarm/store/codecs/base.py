"""Owns the Codec protocol: how the bytes of a block are packed for a tier that stores records.

Never knows keys, checksums or files: `store.record` frames what a codec makes. Implemented by `codecs.raw`
and `codecs.zstd`.
"""

from typing import Protocol


class Codec(Protocol):
    """Stateless, or safe to use from several threads at once."""

    @property
    def name(self) -> str: ...

    @property
    def codec_id(self) -> int:
        """Written into every record, 0 to 255; never reused for another format."""
        ...

    @property
    def is_lossy(self) -> bool:
        """Whether decoding gives other bytes than were encoded. Lossy codecs are part of the key's namespace."""
        ...

    def encode(self, block: memoryview) -> bytes | memoryview:
        """The packed form of `block`; may be `block` itself."""
        ...

    def decode(self, packed: memoryview, out: memoryview) -> None:
        """Fill `out`, which has exactly the size of the block. Raises ValueError for what does not fit."""
        ...
