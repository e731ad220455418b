"""Owns EngineSettings: everything the embedded engine lets its user choose.

Never reads the environment and never imports torch, so that layers above can build it cheaply. Built by
compose from configuration, read by `load` and `runner`.
"""

from dataclasses import dataclass
from typing import Literal

from keepwarm.core.errors import ConfigurationError

BLOCK_SIZE_MULTIPLE = 16
"""Attention works on key ranges that are multiples of a vector of 16 floats, so blocks are too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the embedded engine runs a model."""

    weights: Literal["int8", "fp32"] = "int8"
    """Precision of the linear layers. KV and everything else is 32-bit float in both."""
    block_size: int = 16
    """Tokens per KV block."""
    num_device_blocks: int = 1024
    """Capacity of the device pool in blocks."""
    max_model_len: int | None = None
    """Most positions in one sequence; None takes the model's own limit."""
    num_threads: int | None = None
    """Threads of one step; None leaves torch's default. It is a setting of the whole process."""

    def __post_init__(self) -> None:
        if self.weights not in ("int8", "fp32"):
            raise ConfigurationError(f"weights is {self.weights!r}; use 'int8' or 'fp32'")
        if self.block_size < 1 or self.block_size % BLOCK_SIZE_MULTIPLE:
            raise ConfigurationError(
                f"block_size is {self.block_size}; the torch engine needs a positive multiple of "
                f"{BLOCK_SIZE_MULTIPLE}"
            )
        for name in ("num_device_blocks", "max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} is {value}; it must be at least 1")
