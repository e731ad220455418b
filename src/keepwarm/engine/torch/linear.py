"""Owns the linear layer: one small interface, an 8-bit and a 32-bit implementation.

Every row's result depends on that row alone, bit for bit, whatever else is in the batch. That is why the
8-bit layer scales each row by its own largest value (an integer product is exact in any order), and why
the 32-bit one pads small batches to sizes at which the BLAS gives stable rows.

Never sees the rest of the model. Called by `model`.
"""

import warnings
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

_BITS_TOGETHER = 15
"""Without a dot-product instruction, AVX2 sums two products of an unsigned and a signed byte in 16 bits with
saturation. Inputs of i bits and weights of 15 - i bits fit: 2 * 127 * 127 and 2 * 255 * 64 are below 2**15."""
_SMALLEST_SCALE = 1e-30
"""Keeps an all-zero row from dividing by zero."""

# Accepts 32-bit input, quantises it with a fixed scale while packing, returns 32-bit output.
_linear_int8 = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default


class Linear(Protocol):
    """`x @ weight.T`, with the scale of each row handed back instead of multiplied in."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` is `[rows, inputs]`. Returns `y` `[rows, outputs]` and `scale` `[rows, 1]` or `[1, 1]`.

        The product is `y * scale`; most callers have a per-row factor of their own to join it with.
        """
        ...


class LinearFactory(Protocol):
    def __call__(self, weight: Tensor, *, has_heavy_tails: bool = False) -> Linear:
        """`has_heavy_tails`: the inputs have few values far larger than the rest."""
        ...


class Int8Linear:
    """Weights with one scale per output, inputs with one scale per row, exact integer sums."""

    def __init__(self, weight: Tensor, *, has_heavy_tails: bool = False) -> None:
        # Heavy-tailed inputs need the eighth bit more than the weights do (measured: KL to fp32 falls by 40 %).
        input_bits = 8 if has_heavy_tails else 7
        weight_levels = 2 ** (_BITS_TOGETHER - input_bits - 1) - (0 if has_heavy_tails else 1)
        self._zero_point = 2 ** (input_bits - 1)
        self._input_scale = 1.0 / (self._zero_point - 1)
        scale = (weight.abs().amax(1) / weight_levels).clamp_min_(_SMALLEST_SCALE)
        levels = (weight / scale[:, None]).round_().to(torch.int8)
        with warnings.catch_warnings():
            # Creating 8-bit tensors is deprecated in torch 2.13, which is the version we pin.
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
            quantised = torch._make_per_channel_quantized_tensor(
                levels, scale.double(), torch.zeros(len(weight), dtype=torch.long), 0
            )
            self._packed = torch.ops.quantized.linear_prepack(quantised, None)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, True).clamp_min_(_SMALLEST_SCALE)
        return _linear_int8(x / scale, self._input_scale, self._zero_point, self._packed), scale


class Fp32Linear:
    """32-bit weights. `row_multiple` is `Stability.row_multiple`."""

    def __init__(self, weight: Tensor, row_multiple: int) -> None:
        self._weight = weight.contiguous()
        self._row_multiple = row_multiple
        self._one = torch.ones(1, 1)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = len(x)
        missing = -num_rows % self._row_multiple
        if missing:
            padded = functional.linear(functional.pad(x, (0, 0, 0, missing)), self._weight)
            return padded[:num_rows], self._one
        return functional.linear(x, self._weight), self._one
