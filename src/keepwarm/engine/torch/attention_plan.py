"""Owns the attention plan of one step: which keys each query row reads, padded to stable sizes.

Built once per step by `runner` and used by every layer, so that layers do nothing but call kernels.
Consecutive blocks are read in place; others are gathered. Never touches KV.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keepwarm.engine.torch.stability import KEY_SPAN, Stability

TILE_ROWS = 128
"""Query rows per call. Smaller tiles skip more of the masked triangle, larger ones multiply faster."""
MAX_BATCH = 16
"""Rows gathered for one call: their keys should stay in the cache until they are read."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """What the planner needs to know about one chunk. Chunks of one row come first, shortest first."""

    start: int
    num_rows: int
    block_ids: tuple[int, ...]
    is_sampled: bool

    @property
    def num_keys(self) -> int:
        """Keys that the last row reads."""
        return self.start + self.num_rows


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
class ShortBatch:
    """Single rows over short key ranges, gathered side by side and attended to in one call."""

    num_rows: int
    block_ids: Tensor
    """int64 `[num_rows * blocks per row]`; a shorter row's surplus repeats its first block."""
    num_keys: int
    """Padded, the same for all."""
    bias: Tensor
    """`[num_rows, 1, 1, num_keys]`."""


SingleRows = tuple[ShortBatch | Single, ...]
"""Rows 0, 1, ... in order: as many as each part holds."""


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
    num_singles: int
    singles: SingleRows
    """The first rows of the batch."""
    tiles: tuple[tuple[KeyRange, tuple[Tile, ...]], ...]
    """The other rows, by sequence."""
    sampled_rows: Tensor
    """int64: rows of the batch whose logits are wanted."""
    sampled_singles: SingleRows
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
        tiles: list[tuple[KeyRange, tuple[Tile, ...]]] = []
        sampled_rows: list[int] = []
        row = 0
        for chunk in chunks:
            if chunk.num_rows > 1:
                keys = self._key_range(chunk.block_ids, chunk.num_keys)
                tiles.append((keys, self._tiles(chunk, row)))
            row += chunk.num_rows
            if chunk.is_sampled:
                sampled_rows.append(row - 1)
        singles = [chunk for chunk in chunks if chunk.num_rows == 1]
        return AttentionPlan(
            num_rows=row,
            num_singles=len(singles),
            singles=self._single_rows(singles),
            tiles=tuple(tiles),
            sampled_rows=torch.tensor(sampled_rows, dtype=torch.long),
            sampled_singles=self._single_rows([chunk for chunk in chunks if chunk.is_sampled]),
        )

    def _single_rows(self, chunks: Sequence[ChunkRows]) -> SingleRows:
        """Plan the last row of each chunk; neighbours with short ranges share a call."""
        parts: list[ShortBatch | Single] = []
        short: list[ChunkRows] = []
        for chunk in chunks:
            if chunk.num_keys <= KEY_SPAN:
                short.append(chunk)
                if len(short) < MAX_BATCH:
                    continue
            parts.extend(self._short_batch(short))
            short = []
            if chunk.num_keys > KEY_SPAN:
                parts.append(self._single(chunk))
        parts.extend(self._short_batch(short))
        return tuple(parts)

    def _single(self, chunk: ChunkRows) -> Single:
        keys = self._key_range(chunk.block_ids, chunk.num_keys)
        return Single(keys, self._single_bias(chunk.num_keys, keys.num_keys).view(1, 1, 1, -1))

    def _short_batch(self, chunks: Sequence[ChunkRows]) -> Sequence[ShortBatch | Single]:
        if len(chunks) < 2:
            return [self._single(chunk) for chunk in chunks]
        padded = self._stability.pad_length(max(chunk.num_keys for chunk in chunks))
        per_row = -(-padded // self._block_size)
        block_ids: list[int] = []
        for chunk in chunks:
            used = chunk.block_ids[: -(-chunk.num_keys // self._block_size)]
            block_ids.extend(used)
            block_ids.extend(used[:1] * (per_row - len(used)))
        bias = torch.stack([self._single_bias(chunk.num_keys, padded) for chunk in chunks])
        return [ShortBatch(len(chunks), torch.tensor(block_ids), padded, bias.view(-1, 1, 1, padded))]

    def _key_range(self, block_ids: tuple[int, ...], num_keys: int) -> KeyRange:
        num_blocks = -(-num_keys // self._block_size)
        used = block_ids[:num_blocks]
        padded = self._stability.pad_length(num_keys)
        if used[-1] - used[0] == num_blocks - 1 and tuple(used) == tuple(range(used[0], used[-1] + 1)):
            return KeyRange(used[0] * self._block_size, None, padded)
        return KeyRange(0, torch.tensor(used, dtype=torch.long), padded)

    def _single_bias(self, num_keys: int, padded: int) -> Tensor:
        first = self._num_open - num_keys
        return self._bias[first : first + padded]

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
