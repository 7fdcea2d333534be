"""`ModelConfig`: the shapes and constants of a checkpoint, read from `config.json` and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lily_mlx.kernels.attention import AttentionShape
from lily_mlx.kernels.deltanet import DeltaNetShape

Shape = TypeVar("Shape")
_QWEN3_5 = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_QWEN3_NEXT = "qwen3_next"
SUPPORTED_MODEL_TYPES = (*_QWEN3_5, _QWEN3_NEXT)


@dataclass(frozen=True)
class ModelConfig:
    """One model of Qwen3.5, Qwen3.6 or Qwen3-Next, with experts or dense.

    Attributes:
        model_type: `model_type` of `config.json`.
        hidden_size: width H of the residual stream (`hidden_size`).
        layers: number of decoder layers (`num_hidden_layers`).
        attention_interval: every so many-th layer is softmax attention, the others are Gated DeltaNet
            (`full_attention_interval`).
        vocab_size: rows of the embedding and of the head (`vocab_size`).
        max_positions: longest sequence in tokens (`max_position_embeddings`).
        norm_eps: added to the mean square in every RMSNorm (`rms_norm_eps`).
        attention: heads and rotary embedding of the attention layers.
        deltanet: heads and convolution of the Gated DeltaNet layers.
        experts: routed experts E of a layer (`num_experts`); 0 in a dense model.
        top_k: experts that each token visits (`num_experts_per_tok`).
        expert_size: intermediate size I of each expert (`moe_intermediate_size`); the shared expert's is
            the same.
        normalise_scores: the chosen experts' weights are scaled to sum to 1 (`norm_topk_prob`).
        tied: the head is the embedding (`tie_word_embeddings`).
        eos_token_ids: end-of-sequence ids of `config.json`, replaced by those of
            `generation_config.json` if it has any, as in mlx_lm.
        quantization: the checkpoint's own description of its bits and groups: defaults, and overrides
            keyed by layer path (`quantization`); empty if nothing is quantised.
        mlp_size: intermediate size of the dense MLPs (`intermediate_size`); 0 if there are none.
        dense_layers: layers with a dense MLP and no experts (all layers of a dense model; `mlp_only_layers` and
            `decoder_sparse_step` of Qwen3-Next).
    """

    model_type: str
    hidden_size: int
    layers: int
    attention_interval: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    attention: AttentionShape
    deltanet: DeltaNetShape
    experts: int
    top_k: int
    expert_size: int
    normalise_scores: bool
    tied: bool
    eos_token_ids: tuple[int, ...] = ()
    quantization: Mapping[str, Any] = field(default_factory=dict)
    mlp_size: int = 0
    dense_layers: frozenset[int] = frozenset()

    @property
    def interleaves_heads(self) -> bool:
        """Whether a checkpoint keeps the q, k, v and z rows of each key head together, as Qwen3-Next's do."""
        return self.model_type == _QWEN3_NEXT

    def is_attention(self, layer: int) -> bool:
        """Whether a layer is softmax attention; the others are Gated DeltaNet."""
        return (layer + 1) % self.attention_interval == 0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads the contents of a `config.json`, with or without a `text_config`.

        Raises:
            ValueError: another model family, or fields that are missing or that the kernels do not
                support; one message names all of them.
        """
        require_supported_family(config)
        return _read(cls, config, _Fields(config, config.get("text_config", config)))


def read_config(directory: Path) -> dict[str, Any]:
    """Reads `config.json`, with the end-of-sequence ids of `generation_config.json` where it has some.

    Raises:
        FileNotFoundError: there is no `config.json`.
        ValueError: it is not a JSON object.
    """
    path = directory / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {str(directory)!r} is not a model directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {type(config).__name__}, expected an object")
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path}: model_type is {config.get('model_type')!r}, expected a name such as 'qwen3_5_moe'")
    for name in ("text_config", "quantization", "quantization_config"):
        if name in config and not isinstance(config[name], dict):
            raise ValueError(f"{path}: {name} is {config[name]!r}, expected an object; leave it out if there is none")
    exported = directory / "hf_quant_config.json"
    if "quantization_config" not in config and exported.exists():
        config["quantization_config"] = {"quant_method": exported.name}  # of NVIDIA ModelOpt, which mlx_lm reads
    generation = directory / "generation_config.json"
    if generation.exists():
        try:
            eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError):
            eos = None  # mlx_lm too reads past a broken generation_config.json
        if eos:
            config["eos_token_id"] = eos
    return config


def is_supported_family(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` describes a model of the family that the kernels run."""
    return config.get("model_type") in SUPPORTED_MODEL_TYPES


def require_supported_family(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a model of another family."""
    if not is_supported_family(config):
        raise ValueError(
            f"model_type {config.get('model_type')!r} is not supported: lily_mlx runs "
            f"{', '.join(SUPPORTED_MODEL_TYPES)} (Qwen3.5, Qwen3.6 and Qwen3-Next); use mlx_lm for other models"
        )


def _read(cls: type[ModelConfig], config: Mapping[str, Any], fields: _Fields) -> ModelConfig:
    interval = fields.positive("full_attention_interval", default=4)
    layers = fields.positive("num_hidden_layers")
    hidden_size = fields.positive("hidden_size", multiple_of=64)
    is_next = config["model_type"] == _QWEN3_NEXT
    dense_layers = _dense_layers(fields, layers, is_next)
    mlp_size = fields.positive("intermediate_size", multiple_of=32) if dense_layers else 0
    experts = top_k = expert_size = 0
    if len(dense_layers) < layers:
        experts = fields.positive("num_experts")
        top_k = fields.positive("num_experts_per_tok")
        expert_size = fields.positive("moe_intermediate_size", multiple_of=32)
        shared_size = fields.positive("shared_expert_intermediate_size")
        if top_k > experts:
            fields.reject("num_experts_per_tok", top_k, f"at most num_experts={experts}")
        if shared_size != expert_size:
            fields.reject("shared_expert_intermediate_size", shared_size, f"moe_intermediate_size={expert_size}")

    fields.expect("attention_bias", False)
    fields.expect("attn_output_gate", True)
    fields.expect("hidden_act", "silu")
    fields.check_layer_types(layers, interval)
    entries = {"quantization": fields.quantization, **fields.quantization}
    for path, entry in entries.items():
        mode = entry.get("mode", "affine") if isinstance(entry, Mapping) else "affine"
        if mode != "affine":
            fields.reject(f"{path}.mode", mode, "'affine', the default of mlx_lm.convert")

    attention, deltanet = _attention_shape(fields), _deltanet_shape(fields)
    values: dict[str, Any] = dict(
        model_type=str(config["model_type"]),
        hidden_size=hidden_size,
        layers=layers,
        attention_interval=interval,
        vocab_size=fields.positive("vocab_size"),
        max_positions=fields.positive("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        experts=experts,
        top_k=top_k,
        expert_size=expert_size,
        normalise_scores=bool(fields.get("norm_topk_prob", not is_next)),
        tied=bool(fields.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        eos_token_ids=_eos_token_ids(config.get("eos_token_id"), fields),
        mlp_size=mlp_size,
        dense_layers=dense_layers,
    )
    if fields.problems or attention is None or deltanet is None:
        listed = "\n".join(f"  {problem}" for problem in fields.problems)
        raise ValueError(f"config.json is not supported:\n{listed}")
    return cls(attention=attention, deltanet=deltanet, quantization=fields.quantization, **values)


def _dense_layers(fields: _Fields, layers: int, is_next: bool) -> frozenset[int]:
    """Layers without experts, by the rules of mlx_lm's models."""
    has_experts = fields.get("num_experts", 0)
    if not is_next:
        # mlx_lm's qwen3_5 does not read these; transformers does.
        fields.expect("decoder_sparse_step", 1)
        fields.expect("mlp_only_layers", [])
        return frozenset() if has_experts else frozenset(range(layers))
    step, dense = fields.positive("decoder_sparse_step", default=1), fields.get("mlp_only_layers", None) or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        fields.reject("mlp_only_layers", dense, "a list of layers")
        dense = []
    return frozenset(i for i in range(layers) if not has_experts or i in dense or (i + 1) % step)


def _attention_shape(fields: _Fields) -> AttentionShape | None:
    query_heads = fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads")
    head_dim = fields.positive("head_dim")
    kind = fields.rope("type", fields.rope("rope_type", "default"))
    if kind not in ("default", "mrope"):
        fields.reject("rope_parameters.rope_type", kind, "'default'")
    theta = fields.rope("rope_theta", None)
    if not isinstance(theta, (int, float)) or theta <= 1:
        fields.reject("rope_theta", theta, "a number above 1, in rope_parameters or at the top level")
        return None
    factor = fields.rope("partial_rotary_factor", 0.25)
    if not isinstance(factor, (int, float)) or not 0 < factor <= 1:
        fields.reject("partial_rotary_factor", factor, "a number above 0, at most 1")
        return None
    return fields.shape(AttentionShape, query_heads, kv_heads, head_dim, int(head_dim * factor), float(theta))


def _deltanet_shape(fields: _Fields) -> DeltaNetShape | None:
    return fields.shape(
        DeltaNetShape,
        fields.positive("linear_num_key_heads"),
        fields.positive("linear_num_value_heads"),
        fields.positive("linear_key_head_dim"),
        fields.positive("linear_value_head_dim"),
        fields.positive("linear_conv_kernel_dim"),
    )


def _eos_token_ids(value: Any, fields: _Fields) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        fields.reject("eos_token_id", value, "an integer, a list of integers or null")
        return ()
    return tuple(ids)


class _Fields:
    """Reads fields and collects what is wrong with them, so that one error can name everything."""

    def __init__(self, config: Mapping[str, Any], text: Mapping[str, Any]):
        self.problems: list[str] = []
        self._text = text
        quantization = config.get("quantization", text.get("quantization"))
        foreign = config.get("quantization_config", text.get("quantization_config"))
        if quantization is None and foreign:
            self.reject("quantization_config", foreign, "no such field, or one of mlx_lm.convert beside quantization")
        self.quantization: Mapping[str, Any] = quantization or {}
        self._rope = text.get("rope_parameters") or text.get("rope_scaling") or {}

    def reject(self, name: str, value: Any, supported: str) -> None:
        self.problems.append(f"{name} is {json.dumps(value)}; supported: {supported}")

    def get(self, name: str, default: Any) -> Any:
        return self._text.get(name, default)

    def positive(self, name: str, default: int | None = None, multiple_of: int = 1) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % multiple_of:
            kind = "a positive integer" if multiple_of == 1 else f"a positive multiple of {multiple_of}"
            self.reject(name, value, kind)
            return multiple_of
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or not 0 < value < 1:
            self.reject(name, value, "a number between 0 and 1")
            return default
        return float(value)

    def shape(self, kind: type[Shape], *values: Any) -> Shape | None:
        """A kernel family's shape, which checks what the family supports."""
        if self.problems:
            return None  # the values may be stand-ins
        try:
            return kind(*values)
        except ValueError as error:
            self.problems.append(str(error))
            return None

    def expect(self, name: str, supported: Any) -> None:
        value = self.get(name, None)
        if value is not None and value != supported:
            self.reject(name, value, json.dumps(supported))

    def rope(self, name: str, default: Any) -> Any:
        """A rotary parameter: in `rope_parameters`, else at the top level."""
        return self._rope.get(name, self.get(name, default))

    def check_layer_types(self, layers: int, interval: int) -> None:
        types = self.get("layer_types", None)
        if types is None:
            return
        want = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
        if list(types) != want:
            self.reject("layer_types", types, f"full_attention every {interval} layers, {layers} layers in all")
