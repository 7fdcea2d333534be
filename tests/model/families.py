"""A tiny model of every kind of the family: its configuration, and mlx_lm's model of it with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes

from . import synthetic

Encoding = tuple[int, int] | None  # bits and group size; None: not quantised

_DENSE = {
    "model_type": "qwen3_5",
    "intermediate_size": 192,
    "num_experts": None,
    "num_experts_per_tok": None,
    "moe_intermediate_size": None,
    "shared_expert_intermediate_size": None,
    "norm_topk_prob": None,
}
_NEXT = {
    "model_type": "qwen3_next",
    "intermediate_size": 192,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_parameters": None,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "num_experts_per_tok": 8,
}
_MIXED = {
    "mlp.gate": None,
    "shared_expert_gate": (8, 64),
    "in_proj_b": None,
    "q_proj": (8, 32),
    "layers.1.linear_attn.out_proj": None,
    "up_proj": (8, 64),
    "embed_tokens": None,
}


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint.

    Attributes:
        changes: fields of config.json that differ from `synthetic.TINY`.
        default: encoding of the weights that `encodings` does not name.
        encodings: encodings of the layers whose path ends with a key.
    """

    changes: dict[str, Any]
    default: Encoding = (4, 64)
    encodings: dict[str, Encoding] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """config.json without a quantization. All experts are chosen, so that rounding cannot change the routing."""
        return synthetic.config(**{"num_experts_per_tok": 8, **self.changes, "quantization": None})

    def model(self, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
        """mlx_lm's model with random weights, and its config.json."""
        print(f"seed {seed}")
        mx.random.seed(seed)
        settings = self.settings
        model_class, arguments = _get_classes(settings)
        model = model_class(arguments.from_dict(json.loads(json.dumps(settings))))
        model.update(tree_map_with_path(synthetic._randomise, model.parameters()))
        quantization: dict[str, Any] = {}

        def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
            if not hasattr(module, "to_quantized"):
                return False
            named = [encoding for suffix, encoding in self.encodings.items() if path.endswith(suffix)]
            encoding = named[0] if named else self.default
            quantization[path] = (encoding and {"bits": encoding[0], "group_size": encoding[1]}) or False
            return quantization[path]

        nn.quantize(model, class_predicate=choose)
        model.eval()
        if self.default is not None:
            defaults = {"bits": self.default[0], "group_size": self.default[1]}
            settings["quantization"] = {**defaults, **{k: v for k, v in quantization.items() if v != defaults}}
        return model, settings

    def write(self, directory: Path, seed: int = 0) -> Path:
        """Writes a checkpoint in MLX format."""
        model, settings = self.model(seed)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(settings))
        synthetic.write_tensors(directory, dict(tree_flatten(model.parameters())))
        return directory

    def write_hugging_face(self, directory: Path, seed: int = 0) -> Path:
        """Writes the tensors of a model that is not quantised as Hugging Face names and shapes them."""
        assert self.default is None
        assert not self.encodings
        model, settings = self.model(seed)
        tensors = _hugging_face(dict(tree_flatten(model.parameters())), settings["model_type"])
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(settings))
        synthetic.write_tensors(directory, tensors)
        return directory


KINDS: dict[str, Kind] = {
    "dense": Kind(_DENSE),
    # Heads in the proportions of 0.8B, 27B and 122B-A10B.
    "dense, tied": Kind({**_DENSE, "tie_word_embeddings": True, "linear_num_key_heads": 2}),
    "dense, heads of 27B": Kind(
        {**_DENSE, "num_attention_heads": 6, "linear_num_value_heads": 3, "intermediate_size": 224}, (8, 32)
    ),
    "dense, bfloat16": Kind({**_DENSE, "tie_word_embeddings": True}, None),
    "dense, mixed": Kind(_DENSE, (4, 32), {"down_proj": None, **_MIXED}),
    "next": Kind(_NEXT),
    "next, bfloat16": Kind(_NEXT, None),
    "next, some dense layers": Kind({**_NEXT, "mlp_only_layers": [2], "decoder_sparse_step": 2}),
    "next, mixed": Kind(_NEXT, (4, 64), {"in_proj_ba": None, "mlp.gate": None, "shared_expert.up_proj": None}),
    "experts, bfloat16": Kind({}, None),
    "experts, heads of 122B": Kind({"num_attention_heads": 16, "linear_num_value_heads": 4}, (5, 64)),
    "experts, mixed": Kind({}, (4, 64), _MIXED),
    "experts of a qwen3_5": Kind({"model_type": "qwen3_5"}, (4, 64), {"mlp.gate": (8, 64)}),
}
UNQUANTISED = [name for name, kind in KINDS.items() if kind.default is None]


def _hugging_face(tensors: dict[str, mx.array], model_type: str) -> dict[str, mx.array]:
    """What mlx_lm's `sanitize` turns back into these tensors."""
    renamed: dict[str, mx.array] = {}
    prefix = "model." if model_type == "qwen3_next" else "model.language_model."
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")
    for name, array in tensors.items():
        name = name.replace("language_model.model.", "model.").removeprefix("language_model.")
        if name.startswith("model."):
            name = prefix + name.removeprefix("model.")
        if name.endswith("conv1d.weight"):
            array = array.moveaxis(1, 2)
        elif name.endswith(norms) or name == f"{prefix}norm.weight":
            array = array - 1.0
        renamed[name] = array
    rules: Callable[[dict[str, mx.array]], None] = _split if model_type == "qwen3_next" else _join
    rules(renamed)
    renamed["mtp.layers.0.weight"] = mx.zeros(3)
    return renamed


def _split(tensors: dict[str, mx.array]) -> None:
    for name in [n for n in tensors if ".switch_mlp." in n]:
        stack = tensors.pop(name)
        for expert in range(stack.shape[0]):
            tensors[name.replace("switch_mlp", f"experts.{expert}")] = stack[expert]


def _join(tensors: dict[str, mx.array]) -> None:
    for name in [n for n in tensors if n.endswith(".switch_mlp.gate_proj.weight")]:
        layer = name.removesuffix(".switch_mlp.gate_proj.weight")
        both = [tensors.pop(f"{layer}.switch_mlp.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{layer}.experts.gate_up_proj"] = mx.concatenate(both, axis=-2)
        tensors[f"{layer}.experts.down_proj"] = tensors.pop(f"{layer}.switch_mlp.down_proj.weight")
