"""Owns ModelWeights: one canonical form of a Llama-family model in 32-bit floats, whatever file it came from.

Rows of Q and K are kept in *interleaved* order: dimensions 2i and 2i+1 of a head are one rotary pair, so
that rotary embedding is one complex multiplication. Scores do not change when Q and K rows are permuted
alike. GGUF files of the llama architecture are stored in this order already; Hugging Face files keep the
halves apart and are permuted here.

Never quantises. Filled by `gguf` and `safetensors_folder`, consumed by `model`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from keepwarm.core.errors import ModelFileError
from keepwarm.engine.torch.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Matrices are `[outputs, inputs]`."""

    attention_norm: Tensor
    qkv: Tensor
    """`[(heads + 2 * kv_heads) * head_dim, hidden]`: Q, K, V."""
    qkv_bias: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    """`[2 * intermediate, hidden]`: gate, up."""
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    config: ModelConfig
    embedding: Tensor
    """`[vocab, hidden]`."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    """`[vocab, hidden]`; the embedding itself when the model ties them."""


def interleave_rotary(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of Q or K (`[heads * head_dim, ...]`) from halves to pairs."""
    halves = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLayer:
    """The matrices of one layer as files name them, before fusing."""

    attention_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def fuse_layer(raw: RawLayer, config: ModelConfig, *, is_interleaved: bool) -> LayerWeights:
    """Check shapes, put Q and K into pair order and join the matrices that share an input."""
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    _require_shape("q", raw.q, (width, hidden))
    _require_shape("k", raw.k, (kv_width, hidden))
    _require_shape("v", raw.v, (kv_width, hidden))
    _require_shape("output", raw.output, (hidden, width))
    _require_shape("gate", raw.gate, (inner, hidden))
    _require_shape("up", raw.up, (inner, hidden))
    _require_shape("down", raw.down, (hidden, inner))

    def paired(rows: Tensor) -> Tensor:
        return rows if is_interleaved else interleave_rotary(rows, config.head_dim)

    bias = None
    if raw.q_bias is not None and raw.k_bias is not None and raw.v_bias is not None:
        bias = torch.cat([paired(raw.q_bias), paired(raw.k_bias), raw.v_bias])
    return LayerWeights(
        attention_norm=raw.attention_norm,
        qkv=torch.cat([paired(raw.q), paired(raw.k), raw.v]),
        qkv_bias=bias,
        output=raw.output,
        mlp_norm=raw.mlp_norm,
        gate_up=torch.cat([raw.gate, raw.up]),
        down=raw.down,
    )


def _require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelFileError(f"matrix {name} has shape {tuple(tensor.shape)}, its configuration says {shape}")
