"""Owns which codecs there are, and the gate that keeps lossy ones apart.

Never packs. Called by `compose` (which codec to write with) and by whoever opens a keyed tier (which ones to
read with).

The gate: blocks of a lossy codec are other bytes than were computed, so they may only be found under keys
whose namespace names that codec. A lossless codec fits any namespace, and what one wrote any reader takes.
"""

from collections.abc import Mapping
from types import MappingProxyType

from keepwarm.core.errors import ConfigurationError
from keepwarm.store.codecs.base import Codec
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.codecs.zstd import ZstdCodec

LOSSLESS: Mapping[int, Codec] = MappingProxyType(
    {RawCodec.codec_id: RawCodec(), ZstdCodec.codec_id: ZstdCodec()}
)
"""By codec id: enough to read every record that holds the bytes that were computed."""

_NAMES = (RawCodec.name, ZstdCodec.name)


def codec_named(name: str, *, element_bytes: int = 4) -> Codec:
    """A codec to write with. `element_bytes` is the width of the numbers in a block.

    Raises ConfigurationError for an unknown name.
    """
    if name == RawCodec.name:
        return RawCodec()
    if name == ZstdCodec.name:
        return ZstdCodec(element_bytes=element_bytes)
    raise ConfigurationError(f"there is no codec {name[:40]!r}; use one of: {', '.join(_NAMES)}")


def check_namespace(codec: Codec, codec_in_namespace: str) -> None:
    """Let `codec` store blocks of a namespace that names `codec_in_namespace` ("" for none).

    Raises ConfigurationError for a lossy codec that the namespace does not name.
    """
    if codec.is_lossy and codec.name != codec_in_namespace:
        named = f"names the codec {codec_in_namespace!r}" if codec_in_namespace else "names no codec"
        raise ConfigurationError(
            f"the codec {codec.name!r} is lossy and the blocks' namespace {named}: its blocks would be taken "
            f"for exact ones. Name {codec.name!r} in the namespace, or store with a lossless codec: "
            f"{', '.join(_NAMES)}"
        )
