"""Owns rotating a model before its inputs are quantised, without changing what it computes.

In trained models a few dimensions are a hundred times larger than the rest, and a row scaled by its largest
value loses the others. The residual stream may be multiplied by any orthogonal matrix as long as everything
that reads it is multiplied back: RMSNorm does not notice once its weight is folded away. The same holds for
the values of attention within a head. After such a mixing no dimension stands out. All of it happens to the
weights at load; a step costs nothing more.

Never quantises. Called by `load` for 8-bit weights.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from keepwarm.engine.torch.weights import LayerWeights, ModelWeights


def rotation(size: int) -> Tensor:
    """An orthogonal matrix that leaves no dimension alone: random signs, then a cosine transform (DCT-II)."""
    index = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (index[None] + 0.5) * index[:, None]) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    # Any fixed mixture of signs does; without it a constant vector would end in one dimension.
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
    return (matrix * signs).to(torch.float32)


def rotate_model(weights: ModelWeights) -> ModelWeights:
    """An equivalent model with norms folded into the matrices and all streams mixed."""
    stream, head = rotation(weights.config.hidden_size), rotation(weights.config.head_dim)
    ones = torch.ones(weights.config.hidden_size)
    layers = tuple(_rotate_layer(layer, weights, stream, head, ones) for layer in weights.layers)
    return replace(
        weights,
        embedding=weights.embedding @ stream.T,
        layers=layers,
        final_norm=ones,
        head=(weights.head * weights.final_norm) @ stream.T,
    )


def _rotate_layer(
    layer: LayerWeights, weights: ModelWeights, stream: Tensor, head: Tensor, ones: Tensor
) -> LayerWeights:
    config = weights.config
    first_value = (config.num_heads + config.num_kv_heads) * config.head_dim

    def by_head(columns: Tensor) -> Tensor:
        """Rotate the last dimension head by head."""
        # One tall product: as a batch of small ones it takes a hundred times longer.
        return (columns.reshape(-1, config.head_dim) @ head.T).reshape(columns.shape)

    qkv = (layer.qkv * layer.attention_norm) @ stream.T
    bias = layer.qkv_bias
    if bias is not None:
        bias = torch.cat([bias[:first_value], by_head(bias[first_value:])])
    return LayerWeights(
        attention_norm=ones,
        qkv=torch.cat([qkv[:first_value], by_head(qkv[first_value:].T).T]),
        qkv_bias=bias,
        output=stream @ by_head(layer.output),
        mlp_norm=ones,
        gate_up=(layer.gate_up * layer.mlp_norm) @ stream.T,
        down=stream @ layer.down,
    )
