"""Owns block identity: tiers, namespaces and the keyed hash chain that names a block by its content.

Never touches bytes of KV and never decides where a block lives. Called by workflow (lineage), routing
(prefix index), scheduling and store.
"""

import array
import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from blake3 import blake3

BlockKey = NewType("BlockKey", bytes)
"""16 bytes. Equal keys mean equal namespace, equal tokens in this block and equal keys before it."""

KEY_BYTES = 16


class Tier(enum.StrEnum):
    """Where a block lives, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal before two equal token sequences may share KV.

    `salt` is the tenant's secret: two tenants never share a key unless they share a salt, and because
    the chain is keyed nobody can compute another tenant's keys from tokens alone.
    """

    model: str
    """Fingerprint of the weights and their quantisation."""
    block_size: int
    """Tokens per block."""
    adapter: str = ""
    salt: str = ""

    def root(self) -> BlockKey:
        """Key before the first block: the parent of every chain in this namespace."""
        fields = (self.model, str(self.block_size), self.adapter, self.salt)
        # Lengths are written before values, so that ("ab", "c") and ("a", "bc") differ.
        material = b"".join(len(raw).to_bytes(4, "big") + raw for raw in (field.encode() for field in fields))
        return BlockKey(blake3(material, derive_key_context="keepwarm 2026 block namespace v1").digest())


def extend_chain(
    root: BlockKey, parent: BlockKey, token_ids: Sequence[int], block_size: int
) -> list[BlockKey]:
    """Keys of the full blocks in `token_ids`, which continue after `parent`; a trailing part block has none.

    `root` is `Namespace.root()` (32 bytes, the hash key); `parent` is `root` for the first block and a
    16-byte block key afterwards. Cost is one hash of `16 + 4 * block_size` bytes per block.
    """
    num_full = len(token_ids) // block_size
    packed = array.array("I", token_ids[: num_full * block_size])
    if sys.byteorder == "big":
        packed.byteswap()
    content = packed.tobytes()
    stride = block_size * packed.itemsize
    keys: list[BlockKey] = []
    for offset in range(0, num_full * stride, stride):
        parent = BlockKey(
            blake3(parent + content[offset : offset + stride], key=root).digest(length=KEY_BYTES)
        )
        keys.append(parent)
    return keys
