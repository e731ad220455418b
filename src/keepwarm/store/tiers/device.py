"""Owns DevicePool: the memory of the device tier, one paged tensor of KV.

Never decides who owns a block and never computes. Read and written by the torch engine as a tensor, and by
the host tier as bytes. The only file outside `engine.torch` that imports torch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from keepwarm.core.errors import ConfigurationError


class DevicePool:
    """KV of `num_blocks` blocks for all layers, 32-bit floats, zero at first.

    The bytes of a block are, layer after layer, its tokens' keys of all heads and then values of all heads.
    A block's tokens are neighbours in memory within one layer, so consecutive blocks are read as one view.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        num_slack_slots: int,
    ) -> None:
        """`num_slack_slots` more slots follow the last block, for readers that pad their range."""
        num_slots = num_blocks * block_size
        try:
            # From numpy, whose zeros take no memory and no time until they are written; torch fills its own.
            shape = (num_layers, num_slots + num_slack_slots, 2 * num_kv_heads, head_dim)
            self._kv = torch.from_numpy(np.zeros(shape, dtype=np.float32))
        except (MemoryError, RuntimeError) as error:
            raise ConfigurationError(
                f"a device pool of {num_blocks} blocks does not fit in memory: {error}; lower num_device_blocks"
            ) from error
        self._num_blocks = num_blocks
        self._block_size = block_size
        # [blocks, layers, bytes]: a view, so that block bytes are copied without an intermediate.
        paged = self._kv[:, :num_slots].view(num_layers, num_blocks, -1)
        self._bytes = paged.view(torch.uint8).transpose(0, 1)

    @property
    def kv(self) -> Tensor:
        """`[layers, slots, 2 * kv_heads, head_dim]`; position p of a block b is slot `b * block_size + p`."""
        return self._kv

    @property
    def layout(self) -> str:
        """How the bytes of a block are to be read: blocks that other code wrote are used only if this is equal."""
        layers, _, kv_heads, head_dim = self._kv.shape
        return f"layers-tokens-kv-float32@1:{layers}x{kv_heads}x{head_dim}"

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def block_bytes(self) -> int:
        return self._bytes.shape[1] * self._bytes.shape[2]

    def read_block(self, slot: int, out: memoryview) -> None:
        """Copy the bytes of block `slot` to `out`, which is writable and `block_bytes` long."""
        self._as_tensor(out).copy_(self._bytes[slot])

    def write_block(self, slot: int, src: memoryview) -> None:
        """Overwrite block `slot` with `src`, `block_bytes` long."""
        # torch warns about memory it may not write to, although it only reads here.
        self._bytes[slot].copy_(self._as_tensor(memoryview(bytearray(src)) if src.readonly else src))

    def read_blocks(self, slots: Sequence[int], outs: Sequence[memoryview]) -> None:
        for slot, out in zip(slots, outs, strict=True):
            self.read_block(slot, out)

    def write_blocks(self, slots: Sequence[int], sources: Sequence[memoryview]) -> None:
        for slot, source in zip(slots, sources, strict=True):
            self.write_block(slot, source)

    def make_finite(self, block_ids: Sequence[int]) -> None:
        """Replace NaN and infinity in these blocks by numbers: padded readers may touch them later."""
        for block_id in block_ids:
            first = block_id * self._block_size
            self._kv[:, first : first + self._block_size].nan_to_num_()

    def _as_tensor(self, buffer: memoryview) -> Tensor:
        if buffer.nbytes != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, the buffer has {buffer.nbytes}")
        return torch.frombuffer(buffer, dtype=torch.uint8).view(self._bytes.shape[1:])
