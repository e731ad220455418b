"""Owns DevicePool: the memory of the device tier, one paged tensor of KV.

Never decides who owns a block and never computes. Read and written by the torch engine as a tensor, and by
the host tier as bytes. The only file outside `engine.torch` that imports torch.
"""

import ctypes
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
        # Cutting a block out takes as long as copying a tenth of it, so it is done once.
        self._blocks = self._bytes.unbind(0)
        self._block_shape = (num_layers, self._bytes.shape[2])
        self._block_bytes = num_layers * self._bytes.shape[2]

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
        return self._block_bytes

    def read_block(self, slot: int, out: memoryview) -> None:
        """Copy the bytes of block `slot` to `out`, which is writable and `block_bytes` long."""
        self.read_blocks([slot], [out])

    def write_block(self, slot: int, src: memoryview) -> None:
        """Overwrite block `slot` with `src`, `block_bytes` long."""
        self.write_blocks([slot], [src])

    def read_blocks(self, slots: Sequence[int], outs: Sequence[memoryview]) -> None:
        """`read_block` for each pair; fastest where neighbours on the device go to neighbours in memory."""
        for inside, outside in self._runs(slots, outs):
            outside.copy_(inside)

    def write_blocks(self, slots: Sequence[int], sources: Sequence[memoryview]) -> None:
        """`write_block` for each pair; fastest where neighbours in memory go to neighbours on the device."""
        # torch warns about memory it may not write to, although it only reads here.
        writable = [memoryview(bytearray(source)) if source.readonly else source for source in sources]
        for inside, outside in self._runs(slots, writable):
            inside.copy_(outside)

    def make_finite(self, block_ids: Sequence[int]) -> None:
        """Replace NaN and infinity in these blocks by numbers: padded readers may touch them later."""
        for block_id in block_ids:
            first = block_id * self._block_size
            self._kv[:, first : first + self._block_size].nan_to_num_()

    def _runs(self, slots: Sequence[int], buffers: Sequence[memoryview]) -> list[tuple[Tensor, Tensor]]:
        """The two sides, inside and outside the pool, of each run of blocks that one copy can move.

        Copies of one block after the other wake torch's threads for each, for less than 0.1 ms of work. All
        sides are cut before the first copy, so that those threads do not fall asleep in between.
        """
        flat = [self._as_tensor(buffer) for buffer in buffers]
        if len(slots) != len(flat):
            raise ValueError(f"{len(slots)} slots and {len(flat)} buffers")
        if len(flat) == 1:
            return [(self._blocks[slots[0]], flat[0].view(self._block_shape))]
        addresses = [tensor.data_ptr() for tensor in flat]
        runs: list[tuple[Tensor, Tensor]] = []
        first = 0
        for end in range(1, len(flat) + 1):
            if (
                end < len(flat)
                and slots[end] == slots[end - 1] + 1
                and addresses[end] == addresses[end - 1] + self._block_bytes
            ):
                continue
            if end - first == 1:
                runs.append((self._blocks[slots[first]], flat[first].view(self._block_shape)))
            else:
                # The caller holds a buffer over every byte of this range until the copy is done.
                span = (ctypes.c_char * ((end - first) * self._block_bytes)).from_address(addresses[first])
                outside = torch.frombuffer(span, dtype=torch.uint8).view(-1, *self._block_shape)
                runs.append((self._bytes[slots[first] : slots[first] + end - first], outside))
            first = end
        return runs

    def _as_tensor(self, buffer: memoryview) -> Tensor:
        if buffer.nbytes != self._block_bytes:
            raise ValueError(f"a block has {self._block_bytes} bytes, the buffer has {buffer.nbytes}")
        return torch.frombuffer(buffer, dtype=torch.uint8)
