"""Owns reading a Hugging Face folder (config.json and *.safetensors) into ModelWeights.

Never downloads. Called by `load`.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from keepwarm.core.errors import ModelFileError
from keepwarm.engine.torch.config import config_from_json
from keepwarm.engine.torch.weights import ModelWeights, RawLayer, fuse_layer


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of `folder`, sorted by name."""
    return tuple(sorted(folder.glob("*.safetensors")))


def read_safetensors_folder(folder: Path) -> ModelWeights:
    """Read the model in `folder`. Raises `ModelFileError` when it is damaged or of a kind we do not run."""
    config_path = folder / "config.json"
    try:
        raw_config = json.loads(config_path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{config_path} cannot be read: {error}") from error
    config = config_from_json(raw_config)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise ModelFileError(f"{file} cannot be read: {error}") from error

    def optional(name: str) -> Tensor | None:
        found = tensors.get(name)
        return None if found is None else found.to(torch.float32)

    def required(name: str) -> Tensor:
        found = optional(name)
        if found is None:
            raise ModelFileError(f"no *.safetensors file in {folder} holds {name}")
        return found

    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        raw = RawLayer(
            attention_norm=required(f"{prefix}.input_layernorm.weight"),
            q=required(f"{prefix}.self_attn.q_proj.weight"),
            k=required(f"{prefix}.self_attn.k_proj.weight"),
            v=required(f"{prefix}.self_attn.v_proj.weight"),
            q_bias=optional(f"{prefix}.self_attn.q_proj.bias"),
            k_bias=optional(f"{prefix}.self_attn.k_proj.bias"),
            v_bias=optional(f"{prefix}.self_attn.v_proj.bias"),
            output=required(f"{prefix}.self_attn.o_proj.weight"),
            mlp_norm=required(f"{prefix}.post_attention_layernorm.weight"),
            gate=required(f"{prefix}.mlp.gate_proj.weight"),
            up=required(f"{prefix}.mlp.up_proj.weight"),
            down=required(f"{prefix}.mlp.down_proj.weight"),
        )
        layers.append(fuse_layer(raw, config, is_interleaved=False))
    embedding = required("model.embed_tokens.weight")
    return ModelWeights(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=required("model.norm.weight"),
        head=embedding if raw_config.get("tie_word_embeddings") else required("lm_head.weight"),
    )
