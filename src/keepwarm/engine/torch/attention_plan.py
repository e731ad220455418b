"""Owns the attention plan of one step: which keys each query row reads, padded to stable sizes.

Built once per step by `runner` and used by every layer, so that layers do nothing but call kernels.
Consecutive blocks are read in place; others are gathered. Never touches KV.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keepwarm.engine.torch.stability import Stability

TILE_ROWS = 128
"""Query rows per call. Smaller tiles skip more of the masked triangle, larger ones multiply faster."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """What the planner needs to know about one chunk. Chunks of one row come first in a batch."""

    start: int
    num_rows: int
    block_ids: Sequence[int]
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Where the keys of one sequence lie in the pool."""

    first_slot: int
    """Of the sequence, when its blocks are consecutive."""
    block_ids: Tensor | None
    """int64, when they are not."""
    num_keys: int
    """How many to read: the padded length."""


@dataclass(frozen=True, slots=True)
class Single:
    """One query row: a decode, or a chunk of one token."""

    keys: KeyRange
    bias: Tensor
    """`[1, 1, 1, num_keys]`: 0 where the row may look, minus infinity elsewhere."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive query rows of one sequence."""

    first_row: int
    """In the batch."""
    num_rows: int
    bias: Tensor
    """`[1, 1, padded rows, padded keys]`."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    num_rows: int
    singles: tuple[Single, ...]
    """Rows 0, 1, ... of the batch."""
    tiles: tuple[tuple[KeyRange, tuple[Tile, ...]], ...]
    """The other rows, by sequence."""
    sampled_rows: Tensor
    """int64: rows of the batch whose logits are wanted."""
    sampled_singles: tuple[Single, ...]
    """The same rows as singles: the last layer computes nothing else."""


class AttentionPlanner:
    """Builds plans for one pool. Holds constants only."""

    def __init__(self, block_size: int, max_len: int, stability: Stability) -> None:
        self._block_size = block_size
        self._stability = stability
        self._num_open = stability.pad_length(max_len)
        # Every bias row of a single is a slice of this one.
        self._bias = torch.cat([torch.zeros(self._num_open), torch.full((self._num_open,), -torch.inf)])

    def plan(self, chunks: Sequence[ChunkRows]) -> AttentionPlan:
        singles: list[Single] = []
        tiles: list[tuple[KeyRange, tuple[Tile, ...]]] = []
        sampled_rows: list[int] = []
        sampled_singles: list[Single] = []
        row = 0
        for chunk in chunks:
            num_keys = chunk.start + chunk.num_rows
            keys = self._key_range(chunk.block_ids, num_keys)
            single = Single(keys, self._single_bias(num_keys, keys.num_keys))
            if chunk.num_rows == 1:
                singles.append(single)
            else:
                tiles.append((keys, self._tiles(chunk, row)))
            row += chunk.num_rows
            if chunk.is_sampled:
                sampled_rows.append(row - 1)
                sampled_singles.append(single)
        return AttentionPlan(
            row,
            tuple(singles),
            tuple(tiles),
            torch.tensor(sampled_rows, dtype=torch.long),
            tuple(sampled_singles),
        )

    def _key_range(self, block_ids: Sequence[int], num_keys: int) -> KeyRange:
        num_blocks = -(-num_keys // self._block_size)
        used = block_ids[:num_blocks]
        padded = self._stability.pad_length(num_keys)
        if used[-1] - used[0] == num_blocks - 1 and tuple(used) == tuple(range(used[0], used[-1] + 1)):
            return KeyRange(used[0] * self._block_size, None, padded)
        return KeyRange(0, torch.tensor(used, dtype=torch.long), padded)

    def _single_bias(self, num_keys: int, padded: int) -> Tensor:
        first = self._num_open - num_keys
        return self._bias[first : first + padded].view(1, 1, 1, padded)

    def _tiles(self, chunk: ChunkRows, first_row: int) -> tuple[Tile, ...]:
        tiles = []
        for offset in range(0, chunk.num_rows, TILE_ROWS):
            num_rows = min(TILE_ROWS, chunk.num_rows - offset)
            start = chunk.start + offset
            padded = self._stability.pad_length(start + num_rows)
            positions = torch.arange(start, start + self._stability.pad_rows(num_rows))
            bias = torch.zeros(len(positions), padded)
            # Only keys from `start` on can lie ahead of a row.
            ahead = torch.arange(start, padded) > positions[:, None]
            bias[:, start:].masked_fill_(ahead, -torch.inf)
            tiles.append(Tile(first_row + offset, num_rows, bias.view(1, 1, *bias.shape)))
        return tuple(tiles)
