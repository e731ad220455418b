"""Owns the attention calls of one layer, following an `AttentionPlan`.

Row counts and key ranges are padded to stable sizes (see `stability`), so each row's bits do not depend on
batching, chunking or where its blocks lie. Padding keys have weight zero; they only have to be finite,
which the pool guarantees.

Never writes KV and never samples. Called by `model`.
"""

import torch
from torch import Tensor

from keepwarm.engine.torch.attention_plan import AttentionPlan, KeyRange, Single
from keepwarm.engine.torch.config import ModelConfig
from keepwarm.engine.torch.stability import Stability

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Attention:
    """Attention for one model shape over one pool's layers."""

    def __init__(self, config: ModelConfig, block_size: int, max_len: int, stability: Stability) -> None:
        self._num_kv_heads = config.num_kv_heads
        self._group = config.group_size
        self._head_dim = config.head_dim
        self._width = config.num_heads * config.head_dim
        self._block_size = block_size
        self._stability = stability
        # Gathered keys of one sequence; beyond what was gathered it holds older, finite values.
        whole_blocks = -(-max_len // block_size) * block_size
        num_slots = max(whole_blocks, stability.pad_length(max_len))
        self._scratch = torch.zeros(num_slots, 2 * config.num_kv_heads, config.head_dim)

    def attend(self, query: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
        """All rows of a step.

        `query` is `[rows, heads * head_dim]` (rows may be strided), `kv` one layer of the pool, `[slots,
        2 * kv_heads, head_dim]`. Returns `[rows, heads * head_dim]`.
        """
        if not plan.tiles:
            return self.attend_singles(query, kv, plan.singles)
        out = torch.empty(plan.num_rows, self._width)
        num_singles = len(plan.singles)
        if num_singles:
            out[:num_singles] = self.attend_singles(query[:num_singles], kv, plan.singles)
        heads = (self._num_kv_heads, self._group, self._head_dim)
        query = query.unflatten(1, heads).permute(2, 1, 0, 3)
        target = out.view(-1, *heads).permute(2, 1, 0, 3)
        for key_range, tiles in plan.tiles:
            keys, values = self._read(kv, key_range)
            # Query heads that share a KV head are a batch over the same keys: nothing is repeated in memory.
            keys = keys.expand(self._group, -1, -1, -1)
            values = values.expand(self._group, -1, -1, -1)
            for tile in tiles:
                rows = query.narrow(2, tile.first_row, tile.num_rows)
                num_padded, num_keys = tile.bias.shape[2:]
                if num_padded != tile.num_rows:
                    padded = rows.new_zeros(self._group, self._num_kv_heads, num_padded, self._head_dim)
                    padded.narrow(2, 0, tile.num_rows).copy_(rows)
                    rows = padded
                result = _flash(
                    rows,
                    keys.narrow(2, 0, num_keys),
                    values.narrow(2, 0, num_keys),
                    0.0,
                    False,
                    attn_mask=tile.bias,
                )[0]
                target.narrow(2, tile.first_row, tile.num_rows).copy_(result.narrow(2, 0, tile.num_rows))
        return out

    def attend_singles(self, query: Tensor, kv: Tensor, singles: tuple[Single, ...]) -> Tensor:
        """Rows that each belong to another sequence. `query` is `[len(singles), heads * head_dim]`."""
        num_rows, group = len(singles), self._group
        rows = query.unflatten(1, (self._num_kv_heads, group, self._head_dim))
        num_padded = self._stability.pad_rows(group)
        if num_padded != group:
            padded = rows.new_zeros(num_rows, self._num_kv_heads, num_padded, self._head_dim)
            padded.narrow(2, 0, group).copy_(rows)
            rows = padded
        results = []
        for index, single in enumerate(singles):
            keys, values = self._read(kv, single.keys)
            results.append(
                _flash(rows.narrow(0, index, 1), keys, values, 0.0, False, attn_mask=single.bias)[0]
            )
        joined = results[0] if num_rows == 1 else torch.cat(results)
        return joined.narrow(2, 0, group).reshape(num_rows, self._width)

    def _read(self, kv: Tensor, keys: KeyRange) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence, each `[1, kv_heads, num_keys, head_dim]`, copied only if scattered."""
        if keys.block_ids is None:
            found = kv.narrow(0, keys.first_slot, keys.num_keys)
        else:
            num_slots = len(keys.block_ids) * self._block_size
            blocks = kv.narrow(0, 0, len(kv) // self._block_size * self._block_size).view(
                -1, self._block_size, *kv.shape[1:]
            )
            gathered = self._scratch.narrow(0, 0, num_slots).view(-1, self._block_size, *kv.shape[1:])
            torch.index_select(blocks, 0, keys.block_ids, out=gathered)
            found = self._scratch.narrow(0, 0, keys.num_keys)
        found = found.transpose(0, 1).unsqueeze(0)
        return found.narrow(1, 0, self._num_kv_heads), found.narrow(1, self._num_kv_heads, self._num_kv_heads)
