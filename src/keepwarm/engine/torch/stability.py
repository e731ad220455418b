"""Owns Stability: at which matrix sizes this machine's BLAS gives the same bits for the same row.

A matrix product of few rows, or over a range of keys that the library cuts in other places, is summed in
another order and differs in the last bits. Greedy decoding then depends on what else is in the batch and on
where a prompt was cut. Padding to sizes that were *measured* to be stable removes this at almost no cost.
The measurement takes a few milliseconds when a model is loaded.

Never touches a model. Called by `load`, used by `attention` and `linear`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

KEY_SPAN = 512
"""Keys that torch's CPU attention handles in one piece; pieces are aligned to position 0."""
_STEP = 16
_ROW_MULTIPLES = (1, 2, 4, 8, 16, 32)
_PROBED_ROWS = 96


@dataclass(frozen=True, slots=True)
class Stability:
    row_multiple: int
    """Row counts that are multiples of this give each row the same bits."""
    lengths: tuple[int, ...]
    """`lengths[n]`: the smallest stable number of keys that is at least `n`, for n up to `KEY_SPAN`."""
    is_exact: bool
    """False when the probe found no such row count: then results may differ in the last bits."""

    def pad_length(self, num_keys: int) -> int:
        """Number of keys to read for `num_keys`: less than `KEY_SPAN` more."""
        whole = num_keys // KEY_SPAN * KEY_SPAN
        return whole + self.lengths[num_keys - whole]

    def pad_rows(self, num_rows: int) -> int:
        return -(-num_rows // self.row_multiple) * self.row_multiple


def probe_stability(head_dim: int) -> Stability:
    """Measure the BLAS at the shapes of attention over heads of `head_dim`."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(_PROBED_ROWS, KEY_SPAN, generator=generator)
    values = torch.randn(KEY_SPAN, head_dim, generator=generator)
    queries = torch.randn(_PROBED_ROWS, head_dim, generator=generator)
    row_multiple = next(
        (
            multiple
            for multiple in _ROW_MULTIPLES
            if _rows_are_stable(weights, values, multiple) and _rows_are_stable(queries, values.T, multiple)
        ),
        None,
    )
    stable = [
        length for length in range(_STEP, KEY_SPAN, _STEP) if _length_is_stable(weights, values, length)
    ] + [KEY_SPAN]
    lengths = [0] + [next(length for length in stable if length >= n) for n in range(1, KEY_SPAN + 1)]
    return Stability(row_multiple or 8, tuple(lengths), row_multiple is not None)


def _rows_are_stable(left: Tensor, right: Tensor, multiple: int) -> bool:
    whole = left @ right
    return all(
        torch.equal(left[:rows] @ right, whole[:rows]) for rows in range(multiple, len(left), multiple)
    )


def _length_is_stable(weights: Tensor, values: Tensor, length: int) -> bool:
    """Whether leaving out keys of weight zero changes nothing."""
    masked = weights.clone()
    masked[:, length:] = 0
    return torch.equal(masked @ values, masked[:, :length].contiguous() @ values[:length])
