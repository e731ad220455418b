"""Owns the rotary table: one complex factor per position and rotary pair.

Never applies it. Built once at load, indexed once per step by `model`.
"""

import torch
from torch import Tensor

from keepwarm.engine.torch.config import ModelConfig


def rotary_table(config: ModelConfig, max_len: int) -> Tensor:
    """Factors `exp(i * position * frequency)`, complex64 `[max_len, 1, head_dim / 2]`.

    Angles are 32-bit products, as in the code the models were trained with.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_divisors is not None:
        frequencies = frequencies / torch.tensor(config.rope_divisors)
    elif config.rope_scaling is not None:
        divisors = [config.rope_scaling.divisor(value) for value in frequencies.tolist()]
        frequencies = frequencies / torch.tensor(divisors)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos(), angles.sin()).unsqueeze(1)
