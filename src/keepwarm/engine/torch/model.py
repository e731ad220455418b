"""Owns the forward pass of a Llama-family model over one step's rows.

RMSNorm's weight, and a factor sqrt(hidden), are folded into the matrix that follows it: its input then is a row
of Euclidean length 1. Every operation works row by row, so a row's bits do not depend on the batch.

Never knows requests or blocks. Called by `runner`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from keepwarm.engine.torch.attention import Attention
from keepwarm.engine.torch.attention_plan import AttentionPlan
from keepwarm.engine.torch.linear import InputKind, Linear
from keepwarm.engine.torch.rotary import rotary_table
from keepwarm.engine.torch.weights import LayerWeights, ModelWeights

_norm = torch.linalg.vector_norm


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    qkv_bias: Tensor | None
    output: Linear
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class StepOutput:
    logits: Tensor
    """`[sampled rows, vocab]`, 32-bit."""
    row_lengths: Tensor
    """`[rows, 1]`: not finite for a row whose computation went wrong in any layer before the last."""


class LlamaModel:
    """Weights in their runtime form. Stateless between steps: KV lives in the pool."""

    def __init__(
        self,
        weights: ModelWeights,
        make_linear: Callable[[Tensor, InputKind], Linear],
        attention: Attention,
        max_len: int,
    ) -> None:
        config = weights.config
        self.config = config
        self._attention = attention
        self._embedding = weights.embedding
        self._rotary = rotary_table(config, max_len)
        # x / hypot(|x|, this) is x over its root mean square (with epsilon) times 1/sqrt(hidden).
        self._norm_floor = torch.tensor([[math.sqrt(config.hidden_size * config.rms_eps)]])
        self._layers = tuple(self._prepare(layer, make_linear) for layer in weights.layers)
        self._head = make_linear(self._fold(weights.head, weights.final_norm), InputKind.NORMED)

    def _prepare(self, layer: LayerWeights, make_linear: Callable[[Tensor, InputKind], Linear]) -> _Layer:
        return _Layer(
            qkv=make_linear(self._fold(layer.qkv, layer.attention_norm), InputKind.NORMED),
            qkv_bias=layer.qkv_bias,
            output=make_linear(layer.output, InputKind.FREE),
            gate_up=make_linear(self._fold(layer.gate_up, layer.mlp_norm), InputKind.NORMED),
            down=make_linear(layer.down, InputKind.FREE),
        )

    def _fold(self, matrix: Tensor, norm_weight: Tensor) -> Tensor:
        return matrix * (norm_weight * math.sqrt(self.config.hidden_size))

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, kv: Tensor, plan: AttentionPlan
    ) -> StepOutput:
        """Run one step. `token_ids`, `positions` and `slots` are int64 `[rows]`; `kv` is `[layers, slots, 2 *
        kv_heads, head_dim]` and receives the rows' keys and values at `slots`."""
        config, attention = self.config, self._attention
        width = config.num_heads * config.head_dim
        turned = width + config.num_kv_heads * config.head_dim
        pairs = (config.num_heads + config.num_kv_heads, config.head_dim // 2, 2)
        inner = config.intermediate_size
        x = functional.embedding(token_ids, self._embedding)
        factors = self._rotary.index_select(0, positions)
        layer_kv = kv.unbind()
        flat_kv = kv.flatten(2).unbind()
        last = len(self._layers) - 1
        lengths = x
        for index, layer in enumerate(self._layers):
            # 1. Queries, keys, values.
            lengths = _norm(x, 2, -1, True)
            y = layer.qkv.project(x / lengths.hypot(self._norm_floor))
            if layer.qkv_bias is not None:
                y.add_(layer.qkv_bias)
            torch.view_as_complex(y.narrow(1, 0, turned).view(-1, *pairs)).mul_(factors)
            flat_kv[index].index_copy_(0, slots, y.narrow(1, width, y.shape[1] - width))
            # 2. Attention. The last layer's result matters only where a token is sampled.
            if index == last:
                if not plan.sampled_singles:
                    return StepOutput(x.new_empty(0, config.vocab_size), lengths)
                x = x.index_select(0, plan.sampled_rows)
                query = y.narrow(1, 0, width).index_select(0, plan.sampled_rows)
                mixed = attention.attend_singles(query, layer_kv[index], plan.sampled_singles)
            else:
                mixed = attention.attend(y.narrow(1, 0, width), layer_kv[index], plan)
            layer.output.accumulate(x, mixed)
            # 3. Gated MLP.
            y = layer.gate_up.project(self._normed(x))
            hidden = functional.silu(y.narrow(1, 0, inner), inplace=True).mul_(y.narrow(1, inner, inner))
            layer.down.accumulate(x, hidden)
        return StepOutput(self._head.project(self._normed(x)), lengths)

    def _normed(self, x: Tensor) -> Tensor:
        """Rows over their root mean square, times 1/sqrt(hidden)."""
        lengths: Tensor = _norm(x, 2, -1, True)
        return x / lengths.hypot(self._norm_floor)
