"""Owns reading a GGUF file into ModelWeights. Dequantising is the `gguf` library's work.

Never keeps the file open. Called by `load`.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from keepwarm.core.errors import ModelFileError
from keepwarm.engine.torch.config import ModelConfig
from keepwarm.engine.torch.weights import ModelWeights, RawLayer, fuse_layer
from keepwarm.supply.gguf_header import read_gguf_header


class _File:
    """The entries and tensors of one file, by name."""

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        self._path = path
        self._entries = header.entries
        self._places = header.tensors
        # Mapped, so that only what is dequantised is read; copies are made below.
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self.architecture = str(self.field("general.architecture"))

    def field(self, name: str, default: Any = None) -> Any:
        found = self._entries.get(name, default)
        if found is None:
            raise ModelFileError(f"{self._path} has no field {name}")
        return found

    def shape_field(self, name: str, default: Any = None) -> Any:
        return self.field(f"{self.architecture}.{name}", default)

    def tensor_rows(self, name: str) -> int:
        """Outer size of a matrix, without reading it."""
        if name not in self._places:
            raise ModelFileError(f"{self._path} has no tensor {name}")
        return self._places[name].shape[0]

    def tensor(self, name: str) -> Tensor:
        found = self.optional_tensor(name)
        if found is None:
            raise ModelFileError(f"{self._path} has no tensor {name}")
        return found

    def optional_tensor(self, name: str) -> Tensor | None:
        place = self._places.get(name)
        if place is None:
            return None
        try:
            kind = gguf.GGMLQuantizationType(place.kind)
            per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            num_bytes = math.prod(place.shape) // per_block * block_bytes
            raw = self._bytes[place.offset : place.offset + num_bytes]
            if len(raw) != num_bytes:
                raise ModelFileError(f"{self._path} ends inside of {name}. It is incomplete: fetch it again.")
            values = gguf.dequantize(raw.view(_PLAIN[kind]) if kind in _PLAIN else raw, kind)
        except (KeyError, ValueError, NotImplementedError) as error:
            raise ModelFileError(
                f"{name} in {self._path} is stored in a form (GGML type {place.kind}) that cannot be read: {error}"
            ) from error
        return torch.from_numpy(np.array(values, dtype=np.float32, copy=True).reshape(place.shape))


_PLAIN = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
"""Types that are plain numbers; the library wants those as such, and quantised ones as bytes."""


def read_gguf(path: Path) -> ModelWeights:
    """Read and dequantise `path`. Raises `ModelFileError` when it is damaged or of a kind we do not run."""
    file = _File(path)
    config = _read_config(file)
    layers = []
    for index in range(config.num_layers):
        prefix = f"blk.{index}"
        raw = RawLayer(
            attention_norm=file.tensor(f"{prefix}.attn_norm.weight"),
            q=file.tensor(f"{prefix}.attn_q.weight"),
            k=file.tensor(f"{prefix}.attn_k.weight"),
            v=file.tensor(f"{prefix}.attn_v.weight"),
            q_bias=file.optional_tensor(f"{prefix}.attn_q.bias"),
            k_bias=file.optional_tensor(f"{prefix}.attn_k.bias"),
            v_bias=file.optional_tensor(f"{prefix}.attn_v.bias"),
            output=file.tensor(f"{prefix}.attn_output.weight"),
            mlp_norm=file.tensor(f"{prefix}.ffn_norm.weight"),
            gate=file.tensor(f"{prefix}.ffn_gate.weight"),
            up=file.tensor(f"{prefix}.ffn_up.weight"),
            down=file.tensor(f"{prefix}.ffn_down.weight"),
        )
        # The converter to GGUF permutes Q and K of llama models only.
        layers.append(fuse_layer(raw, config, is_interleaved=config.architecture == "llama"))
    embedding = file.tensor("token_embd.weight")
    head = file.optional_tensor("output.weight")
    return ModelWeights(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=file.tensor("output_norm.weight"),
        head=embedding if head is None else head,
    )


def _read_config(file: _File) -> ModelConfig:
    num_heads = int(file.shape_field("attention.head_count"))
    hidden = int(file.shape_field("embedding_length"))
    head_dim = int(file.shape_field("attention.key_length", hidden // num_heads))
    if int(file.shape_field("rope.dimension_count", head_dim)) != head_dim:
        raise ModelFileError("rotary embedding over a part of the head is not supported")
    divisors = file.optional_tensor("rope_freqs.weight")
    return ModelConfig(
        architecture=file.architecture,
        num_layers=int(file.shape_field("block_count")),
        hidden_size=hidden,
        intermediate_size=int(file.shape_field("feed_forward_length")),
        num_heads=num_heads,
        num_kv_heads=int(file.shape_field("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        vocab_size=int(file.tensor_rows("token_embd.weight")),
        max_len=int(file.shape_field("context_length")),
        rope_theta=float(file.shape_field("rope.freq_base", 10000.0)),
        rms_eps=float(file.shape_field("attention.layer_norm_rms_epsilon")),
        rope_divisors=None if divisors is None else tuple(divisors.tolist()),
    )
