"""Small checkpoints with random weights, written by mlx_lm itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.qwen3_5_moe import Model, ModelArgs

TINY: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "eos_token_id": 0,
}


def config(**changes: Any) -> dict[str, Any]:
    """The tiny configuration with some fields changed; None removes a field."""
    merged = {**TINY, "quantization": {"group_size": 64, "bits": 4, "mode": "affine"}, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def random_model(
    settings: Mapping[str, Any], seed: int = 0, encodings: Mapping[str, tuple[int, int]] | None = None
) -> tuple[Model, dict[str, Any]]:
    """mlx_lm's model with random quantised weights, and its configuration.

    Args:
        settings: from `config`.
        encodings: (bits, group size) of the layers whose path ends with a key; the routers have 8 bits.
    """
    print(f"seed {seed}")
    encodings = {"mlp.gate": (8, 64), "mlp.shared_expert_gate": (8, 64), **(encodings or {})}
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict({"text_config": {**settings}, "model_type": settings["model_type"]}))
    model.update(tree_map_with_path(_randomise, model.parameters()))
    quantization = dict(settings["quantization"])

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        for suffix, (bits, group_size) in encodings.items():
            if path.endswith(suffix):
                quantization[path] = {"bits": bits, "group_size": group_size}
                return quantization[path]
        return True

    nn.quantize(model, quantization["group_size"], quantization["bits"], class_predicate=choose)
    model.eval()
    return model, {**settings, "quantization": quantization}


def write_checkpoint(
    directory: Path,
    settings: Mapping[str, Any],
    seed: int = 0,
    shards: int = 1,
    encodings: Mapping[str, tuple[int, int]] | None = None,
) -> Path:
    """Writes a checkpoint of a random model and returns its directory."""
    model, complete = random_model(settings, seed, encodings)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(complete))
    write_tensors(directory, dict(tree_flatten(model.parameters())), shards)
    return directory


def write_tensors(directory: Path, tensors: Mapping[str, mx.array], shards: int = 1) -> None:
    """Writes safetensors files, with an index if there are several."""
    if shards == 1:
        mx.save_safetensors(str(directory / "model.safetensors"), dict(tensors), {"format": "mlx"})
        return
    weight_map = {}
    names = sorted(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        mx.save_safetensors(str(directory / file), part, {"format": "mlx"})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read_tensors(directory: Path) -> dict[str, mx.array]:
    """All tensors of a checkpoint with one file, read into memory."""
    tensors = mx.load(str(directory / "model.safetensors"))
    mx.eval(tensors)
    return tensors


def _randomise(path: str, like: mx.array) -> mx.array:
    noise = mx.random.normal(like.shape)
    if path.endswith("A_log"):
        return mx.log(mx.random.uniform(1.0, 16.0, like.shape))
    if path.endswith("dt_bias"):
        return mx.random.uniform(-6.0, -2.0, like.shape).astype(mx.bfloat16)
    if path.endswith("conv1d.weight"):
        return (0.5 * noise).astype(mx.bfloat16)
    if like.ndim == 1:
        return (1.0 + 0.1 * noise).astype(mx.bfloat16)
    if path.endswith("embed_tokens.weight"):
        return noise.astype(mx.bfloat16)
    scale = 3.0 if path.endswith("lm_head.weight") else 1.0
    return (noise * scale * like.shape[-1] ** -0.5).astype(mx.bfloat16)
