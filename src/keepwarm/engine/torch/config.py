"""Owns ModelConfig: the shape of a Llama-family model, and how it is read from a `config.json`.

Never reads weights. Filled by `gguf` or `safetensors_folder`, read by `model`, `rotary` and `runner`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepwarm.core.errors import ModelFileError

SUPPORTED_ARCHITECTURES = ("llama", "qwen2")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling: long waves are slowed by `factor`, short ones are left alone."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int

    def divisor(self, inv_freq: float) -> float:
        """By how much `inv_freq` (radians per position) is divided."""
        waves = self.original_max_len * inv_freq / (2 * math.pi)
        if waves < self.low_freq_factor:
            return self.factor
        if waves > self.high_freq_factor:
            return 1.0
        smooth = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return 1.0 / ((1 - smooth) / self.factor + smooth)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_len: int
    """Most positions the model was trained for."""
    rope_theta: float
    rms_eps: float
    rope_scaling: RopeScaling | None = None
    rope_divisors: tuple[float, ...] | None = None
    """Per frequency, as GGUF files give them; takes the place of `rope_scaling`."""

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def __post_init__(self) -> None:
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            raise ModelFileError(
                f"the model's architecture is {self.architecture!r}; the torch engine runs "
                f"{', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ModelFileError(
                f"{self.num_heads} heads of {self.head_dim} over {self.num_kv_heads} KV heads do not divide"
            )


def config_from_json(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the contents of a Hugging Face `config.json`. Raises `ModelFileError` for what we cannot run."""
    try:
        return _from_json(raw)
    except (KeyError, TypeError) as error:
        raise ModelFileError(f"config.json lacks or misstates a field: {error!r}") from error


def _from_json(raw: Mapping[str, Any]) -> ModelConfig:
    # transformers 5 moved rope_theta and rope_scaling into `rope_parameters`.
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_len=int(rope["original_max_position_embeddings"]),
        )
    elif kind != "default":
        raise ModelFileError(
            f"rope scaling {kind!r} is not supported; use a model without it or with 'llama3'"
        )
    if raw.get("use_sliding_window"):
        raise ModelFileError("sliding-window attention is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelFileError(f"activation {raw['hidden_act']!r} is not supported, only 'silu'")
    num_heads = int(raw["num_attention_heads"])
    return ModelConfig(
        architecture=str(raw["model_type"]),
        num_layers=int(raw["num_hidden_layers"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // num_heads),
        vocab_size=int(raw["vocab_size"]),
        max_len=int(raw["max_position_embeddings"]),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_scaling=scaling,
    )
