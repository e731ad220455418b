"""Owns the attention calls of one layer, following an `AttentionPlan`.

Row counts and key ranges are padded to stable sizes (see `stability`), so each row's bits do not depend on
batching, chunking or where its blocks lie. Padding keys have weight zero; they only have to be finite,
which the pool guarantees.

Never writes KV and never samples. Called by `model`.
"""

import torch
from torch import Tensor

from keepwarm.engine.torch.attention_plan import AttentionPlan, KeyRange, ShortBatch, SingleRows
from keepwarm.engine.torch.config import ModelConfig
from keepwarm.engine.torch.stability import KEY_SPAN, Stability

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Attention:
    """Attention for one model shape over one pool's layers."""

    def __init__(self, config: ModelConfig, block_size: int, stability: Stability) -> None:
        self._num_kv_heads = config.num_kv_heads
        self._group = config.group_size
        self._head_dim = config.head_dim
        self._width = config.num_heads * config.head_dim
        self._block_size = block_size
        self._num_padded = stability.pad_rows(config.group_size)
        self._slot_width = 2 * config.num_kv_heads * config.head_dim
        # Gathered keys of one sequence or of a batch of short ones; grows to the longest that was scattered.
        # Beyond what was gathered it holds older, finite values.
        self._scratch = torch.zeros(0)

    def attend(self, query: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
        """All rows of a step.

        `query` is `[rows, heads * head_dim]` (rows may be strided), `kv` one layer of the pool, `[slots,
        2 * kv_heads, head_dim]`. Returns `[rows, heads * head_dim]`.
        """
        if not plan.tiles:
            return self.attend_singles(query, kv, plan.singles)
        out = torch.empty(plan.num_rows, self._width)
        if plan.num_singles:
            out[: plan.num_singles] = self.attend_singles(query[: plan.num_singles], kv, plan.singles)
        heads = (self._num_kv_heads, self._group, self._head_dim)
        query = query.view(-1, *heads).permute(2, 1, 0, 3)
        target = out.view(-1, *heads).permute(2, 1, 0, 3)
        for key_range, tiles in plan.tiles:
            source = self._source(kv, key_range)
            for tile in tiles:
                rows = query.narrow(2, tile.first_row, tile.num_rows)
                num_padded, num_keys = tile.bias.shape[2:]
                if num_padded != tile.num_rows:
                    padded = rows.new_zeros(self._group, self._num_kv_heads, num_padded, self._head_dim)
                    padded.narrow(2, 0, tile.num_rows).copy_(rows)
                    rows = padded
                # Query heads that share a KV head are a batch over the same keys: nothing is repeated.
                keys, values = self._heads(source, self._group, num_keys, 0)
                result = _flash(rows, keys, values, 0.0, False, attn_mask=tile.bias)[0]
                target.narrow(2, tile.first_row, tile.num_rows).copy_(result.narrow(2, 0, tile.num_rows))
        return out

    def attend_singles(self, query: Tensor, kv: Tensor, parts: SingleRows) -> Tensor:
        """Rows that each belong to another sequence. `query` and the result are `[rows, heads * head_dim]`."""
        num_rows, group = len(query), self._group
        rows = query.view(num_rows, self._num_kv_heads, group, self._head_dim)
        if self._num_padded != group:
            padded = rows.new_zeros(num_rows, self._num_kv_heads, self._num_padded, self._head_dim)
            padded.narrow(2, 0, group).copy_(rows)
            rows = padded
        results = []
        row = 0
        for part in parts:
            if isinstance(part, ShortBatch):
                count = part.num_rows
                source = self._gather(kv, part.block_ids)
                keys, values = self._heads(source, count, part.num_keys, len(part.block_ids) // count)
            else:
                count = 1
                keys, values = self._heads(self._source(kv, part.keys), 1, part.keys.num_keys, 0)
            results.append(
                _flash(rows.narrow(0, row, count), keys, values, 0.0, False, attn_mask=part.bias)[0]
            )
            row += count
        joined = results[0] if len(results) == 1 else torch.cat(results)
        return joined.narrow(2, 0, group).reshape(num_rows, self._width)

    def _source(self, kv: Tensor, keys: KeyRange) -> Tensor:
        """Slots that begin with the first key of a sequence: in place, or gathered if it is scattered."""
        if keys.block_ids is None:
            return kv.narrow(0, keys.first_slot, keys.num_keys)
        return self._gather(kv, keys.block_ids)

    def _gather(self, kv: Tensor, block_ids: Tensor) -> Tensor:
        """Copy blocks side by side. Readers may look `KEY_SPAN` slots beyond the last one."""
        num_blocks, row = len(block_ids), self._slot_width * self._block_size
        needed = num_blocks * row + KEY_SPAN * self._slot_width
        if len(self._scratch) < needed:
            self._scratch = torch.zeros(needed)
        blocks = kv.as_strided((len(kv) // self._block_size, row), (row, 1))
        torch.index_select(blocks, 0, block_ids, out=self._scratch.as_strided((num_blocks, row), (row, 1)))
        return self._scratch

    def _heads(self, source: Tensor, batch: int, num_keys: int, blocks_apart: int) -> tuple[Tensor, Tensor]:
        """Views of keys and values, each `[batch, kv_heads, num_keys, head_dim]`, from `source` on.

        Sequences of the batch lie `blocks_apart` blocks from each other; 0 means that all read the same keys.
        """
        dim = self._head_dim
        width = self._slot_width
        shape = (batch, self._num_kv_heads, num_keys, dim)
        strides = (blocks_apart * self._block_size * width, dim, width, 1)
        offset = source.storage_offset()
        return (
            source.as_strided(shape, strides, offset),
            source.as_strided(shape, strides, offset + self._num_kv_heads * dim),
        )
