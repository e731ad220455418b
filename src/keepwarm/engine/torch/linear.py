"""Owns the linear layer: one small interface, an 8-bit and a 32-bit implementation.

Every row's result depends on that row alone, bit for bit, whatever else is in the batch. That is why the
8-bit layer never takes a scale from the whole batch (its integer sums are exact in any order), and why the
32-bit one pads small batches to sizes at which the BLAS gives stable rows.

Never sees the rest of the model. Called by `model`.
"""

import math
import warnings
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class _Precision:
    """How many steps inputs and weights have on each side of zero.

    Without a dot-product instruction, AVX2 sums two products of an unsigned and a signed byte in 16 bits with
    saturation. Only `inputs + weights` near 127 + 64 could never saturate; but a pair that does is so rare
    with the values here (several deviations in four numbers at once) that finer steps win by far.
    """

    inputs: int
    weights: int


# Measured by KL to the 32-bit model on SmolLM2-135M, see bench/LOG.md. With 127 for both, saturation shows.
# Inputs with heavy tails (the products inside an MLP) need precision more than weights do.
_EVEN = _Precision(inputs=108, weights=108)
_HEAVY_TAILED = _Precision(inputs=127, weights=96)
_PEAK = 4.0
"""Normed rows have `inputs` steps up to this many root mean squares. More is clipped only from 4.7 on."""
_ZERO_POINT = 128
_SMALLEST_SCALE = 1e-30
"""Keeps an all-zero row from dividing by zero."""

# Accepts 32-bit input, quantises it with a fixed scale while packing, returns 32-bit output.
_linear_int8 = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default


class InputKind(Enum):
    """What a matrix is multiplied with; decides which of the two calls it is made for."""

    NORMED = "normed"
    """Rows of Euclidean length 1 in which no dimension stands out."""
    FREE = "free"
    """Rows of any length, some values far larger than the rest."""


class Linear(Protocol):
    """A matrix `weight`, `[outputs, inputs]`."""

    def project(self, x: Tensor) -> Tensor:
        """`x @ weight.T` for normed rows."""
        ...

    def accumulate(self, residual: Tensor, x: Tensor) -> None:
        """`residual += x @ weight.T` for free rows."""
        ...


class Int8Linear:
    """Weights with one scale per output; inputs with a fixed scale when normed, else one per row."""

    def __init__(self, weight: Tensor, kind: InputKind) -> None:
        precision = _EVEN if kind is InputKind.NORMED else _HEAVY_TAILED
        weight_scale = (weight.abs().amax(1) / precision.weights).clamp_min_(_SMALLEST_SCALE)
        levels = (weight / weight_scale[:, None]).round_().to(torch.int8)
        with warnings.catch_warnings():
            # Creating 8-bit tensors is deprecated in torch 2.13, which is the version we pin.
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
            quantised = torch._make_per_channel_quantized_tensor(
                levels, weight_scale.double(), torch.zeros(len(weight), dtype=torch.long), 0
            )
            self._packed = torch.ops.quantized.linear_prepack(quantised, None)
        largest = _PEAK / math.sqrt(weight.shape[1]) if kind is InputKind.NORMED else 1.0
        self._input_scale = largest / precision.inputs

    def project(self, x: Tensor) -> Tensor:
        result: Tensor = _linear_int8(x, self._input_scale, _ZERO_POINT, self._packed)
        return result

    def accumulate(self, residual: Tensor, x: Tensor) -> None:
        scale = x.abs().amax(-1, True).clamp_min_(_SMALLEST_SCALE)
        residual.addcmul_(_linear_int8(x / scale, self._input_scale, _ZERO_POINT, self._packed), scale)


def int8_is_available() -> bool:
    """Whether this build of torch has the 8-bit kernel; builds for other processors than x86 may lack it."""
    try:
        Int8Linear(torch.ones(8, 8), InputKind.NORMED).project(torch.ones(1, 8))
    except (RuntimeError, NotImplementedError):
        return False
    return True


class Fp32Linear:
    """32-bit weights. `row_multiple` is `Stability.row_multiple`."""

    def __init__(self, weight: Tensor, row_multiple: int) -> None:
        self._weight = weight.contiguous()
        self._row_multiple = row_multiple

    def project(self, x: Tensor) -> Tensor:
        num_rows = len(x)
        missing = -num_rows % self._row_multiple
        if missing:
            return functional.linear(functional.pad(x, (0, 0, 0, missing)), self._weight)[:num_rows]
        return functional.linear(x, self._weight)

    def accumulate(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self.project(x))
