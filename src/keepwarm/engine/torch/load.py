"""Owns loading: from a model path and settings to a ready TorchExecutor.

Never downloads and never guesses a model's tokenizer. Called by compose in the worker process.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from keepwarm.core.errors import ModelFileError
from keepwarm.engine.executor import ModelInfo
from keepwarm.engine.torch.attention import Attention
from keepwarm.engine.torch.attention_plan import AttentionPlanner
from keepwarm.engine.torch.gguf import read_gguf
from keepwarm.engine.torch.linear import Fp32Linear, InputKind, Int8Linear, Linear, int8_is_available
from keepwarm.engine.torch.model import LlamaModel
from keepwarm.engine.torch.rotation import rotate_model
from keepwarm.engine.torch.runner import TorchExecutor
from keepwarm.engine.torch.safetensors_folder import read_safetensors_folder, weight_files
from keepwarm.engine.torch.settings import EngineSettings
from keepwarm.engine.torch.stability import KEY_SPAN, probe_stability
from keepwarm.engine.torch.weights import ModelWeights
from keepwarm.store.tiers.device import DevicePool

_log = logging.getLogger(__name__)

_KV_LAYOUT = "pairs-rotated-fp32-1"
"""Changes whenever the meaning of a block's bytes changes, so that old blocks are never found again."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """Weights in memory, before it is decided how much KV may stand beside them."""

    weights: ModelWeights
    name: str
    files: tuple[Path, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.weights.config
        return config.num_layers * 2 * config.num_kv_heads * config.head_dim * torch.float32.itemsize

    def build(self, settings: EngineSettings) -> TorchExecutor:
        """Raises `ConfigurationError` when the device pool does not fit in memory."""
        if settings.weights == "int8" and not int8_is_available():
            _log.warning("this build of torch has no 8-bit kernels; running with 32-bit weights")
            settings = replace(settings, weights="fp32")
        fingerprint = _fingerprint(self.files, settings)
        return build_executor(self.weights, settings, name=self.name, fingerprint=fingerprint)


def open_model(path: Path) -> OpenedModel:
    """Read the GGUF file or safetensors folder at `path`. Raises `ModelFileError` when it cannot be run."""
    if path.is_dir():
        files: tuple[Path, ...] = (path / "config.json", *weight_files(path))
        return OpenedModel(read_safetensors_folder(path), path.name, files)
    if path.is_file():
        return OpenedModel(read_gguf(path), path.stem, (path,))
    raise ModelFileError(f"there is no model at {path}; give a GGUF file or a folder with safetensors files")


def load_executor(path: Path, settings: EngineSettings) -> TorchExecutor:
    """Open and build in one go, for callers that know their pool size."""
    return open_model(path).build(settings)


def build_executor(
    weights: ModelWeights, settings: EngineSettings, *, name: str, fingerprint: str
) -> TorchExecutor:
    """Assemble an executor from weights in memory."""
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    config = weights.config
    max_len = min(settings.max_model_len or config.max_len, config.max_len)
    stability = probe_stability(config.head_dim)
    if not stability.is_exact:
        _log.warning(
            "no matrix sizes with stable bits found here; batching may change the last bits of results"
        )
    attention = Attention(config, settings.block_size, stability)

    def make_linear(weight: Tensor, kind: InputKind) -> Linear:
        if settings.weights == "int8":
            return Int8Linear(weight, kind)
        return Fp32Linear(weight, stability.row_multiple)

    pool = DevicePool(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=settings.num_device_blocks,
        block_size=settings.block_size,
        num_slack_slots=KEY_SPAN,
    )
    info = ModelInfo(
        name=name,
        fingerprint=fingerprint,
        vocab_size=config.vocab_size,
        max_model_len=max_len,
        block_size=settings.block_size,
        kv_bytes_per_token=pool.block_bytes // settings.block_size,
    )
    with torch.inference_mode():
        if settings.weights == "int8":
            weights = rotate_model(weights)
        model = LlamaModel(weights, make_linear, attention, max_len)
    return TorchExecutor(info, model, pool, AttentionPlanner(settings.block_size, max_len, stability))


def _fingerprint(files: tuple[Path, ...], settings: EngineSettings) -> str:
    """Hash of everything that decides the bytes of a block, 32 hexadecimal digits."""
    whole = blake3(f"{_KV_LAYOUT} {settings.weights}".encode())
    for file in files:
        part = blake3(max_threads=blake3.AUTO)
        try:
            part.update_mmap(file)
        except OSError as error:
            raise ModelFileError(f"{file} cannot be read: {error}") from error
        whole.update(part.digest())
    return whole.hexdigest(length=16)
