"""Reads a checkpoint into the kernels' joined layout.

Everything is checked from the files' headers first, and one error names all that is wrong. Then each
layer is read, joined, packed and evaluated before the next one, so that peak memory is the weights plus one layer.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear.weight import BFLOAT16_BITS, BITS, GROUP_SIZES, NO_GROUPS
from lily_mlx.kernels.moe import ExpertWeights

from .config import ModelConfig
from .layout import Shape, interleaved_rows, linear_shapes, plain_shapes
from .quantization import alike, join_rows, take_rows
from .tensors import CheckpointTensors, canonical_name
from .weights import (
    AttentionWeights,
    DeltaNetWeights,
    LayerWeights,
    MLPWeights,
    ModelWeights,
    MoEWeights,
    Tree,
    arrays_of,
)

logger = logging.getLogger("lily_mlx")

_FLOATS = (mx.bfloat16, mx.float16, mx.float32)

# Called with the name of each weight that is used as the checkpoint has it, once its array exists.
OnPacked = Callable[[str, QuantizedWeight], object]


def load_weights(
    directory: Path,
    config: ModelConfig,
    arrays: Iterable[tuple[str, mx.array]] | None = None,
    on_packed: OnPacked | None = None,
) -> ModelWeights:
    """Reads all weights of a checkpoint.

    Args:
        directory: holds `model*.safetensors`, with an index if there are several.
        config: the checkpoint's configuration; every tensor must have the shape that it implies.
        arrays: the checkpoint's tensors with their names, where they are in memory and not in files.
        on_packed: called for each weight that is neither joined with another one nor encoded anew, after its layer
            is evaluated. Whoever holds its three arrays can take views of the packed one there instead.

    Raises:
        FileNotFoundError: a weight file is missing.
        ValueError: a file is truncated, or tensors are missing, unexpected, misshapen or in an encoding
            that the kernels do not read; one message names all of them.
    """
    tensors = CheckpointTensors(directory, arrays)
    encodings = _check(directory, tensors, config)
    return assemble(tensors, encodings, config, mx.eval, on_packed)


def _check(directory: Path, tensors: CheckpointTensors, config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Checks all tensors; returns (bits, group size) for each weight that may be quantised."""
    linears, plains = linear_shapes(config), plain_shapes(config)
    overrides = {canonical_name(path): value for path, value in config.quantization.items()}
    problems: list[str] = []
    encodings = {}
    for path, shape in linears.items():
        encoding = _check_linear(tensors, path, shape, overrides.get(path), problems)
        if encoding is not None:
            encodings[path] = encoding
    quantized = {path: encoding for path, encoding in encodings.items() if encoding[0] != BFLOAT16_BITS}
    if quantized and not config.quantization:
        problems.append(f"config.json has no quantization, but {len(quantized)} weights are quantised: add it")
    _check_default(config, {path: e for path, e in quantized.items() if path not in overrides}, problems)
    for name, shape in plains.items():
        _check_plain(tensors, name, shape, problems)
    expected = set(plains) | {f"{path}.weight" for path in linears}
    expected |= {f"{path}.{part}" for path in quantized for part in ("scales", "biases")}
    for name in tensors.names:
        if name not in expected and not (config.tied and name.startswith("lm_head.")):
            problems.append(f"unexpected tensor {tensors.original_names[name]} {list(tensors.shape(name))}")
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"the weights in {str(directory)!r} do not fit its config.json:\n{listed}")
    return encodings


def _check_plain(tensors: CheckpointTensors, name: str, shape: Shape, problems: list[str]) -> None:
    if name not in tensors:
        problems.append(f"missing tensor {name} {list(shape)}")
    elif tensors.shape(name) != shape:
        problems.append(f"tensor {name} has shape {list(tensors.shape(name))}, expected {list(shape)}")
    elif tensors.dtype(name) not in _FLOATS:
        problems.append(f"tensor {name} is {_dtype(tensors, name)}, expected bfloat16 or float32")


def _check_linear(
    tensors: CheckpointTensors, path: str, shape: Shape, override: Any, problems: list[str]
) -> tuple[int, int] | None:
    """Checks the tensors of a weight; its bits and group size follow from the shapes."""
    weight, scales, biases = (f"{path}.{part}" for part in ("weight", "scales", "biases"))
    if weight in tensors and scales not in tensors and tensors.dtype(weight) in _FLOATS:
        _check_plain(tensors, weight, shape, problems)
        if isinstance(override, Mapping):
            problems.append(f"config.json says that {path} is quantised, but it has no scales")
        return BFLOAT16_BITS, NO_GROUPS
    missing = [name for name in (weight, scales, biases) if name not in tensors]
    if missing:
        problems.extend(f"missing tensor {name}" for name in missing)
        return None
    *lead, columns = shape
    words, groups = tensors.shape(weight)[-1], tensors.shape(scales)[-1]
    bits, group_size = words * 32 // columns, columns // max(groups, 1)
    found = (list(tensors.shape(weight)), list(tensors.shape(scales)), list(tensors.shape(biases)))
    want = ([*lead, columns * bits // 32], [*lead, columns // max(group_size, 1)])
    if found != (want[0], want[1], want[1]) or bits not in BITS or group_size not in GROUP_SIZES:
        problems.append(
            f"quantised weight {path} has shapes weight {found[0]}, scales {found[1]}, biases {found[2]}; "
            f"they do not encode {list(shape)} in {_list(BITS)} bits and groups of {_list(GROUP_SIZES)}"
        )
        return None
    if tensors.dtype(weight) != mx.uint32 or tensors.dtype(scales) not in _FLOATS:
        problems.append(
            f"quantised weight {path} has dtypes {_dtype(tensors, weight)} and {_dtype(tensors, scales)}; "
            "expected uint32 codes with bfloat16 scales (mode affine)"
        )
        return None
    if override is False:
        problems.append(f"config.json says that {path} is not quantised, but it has {bits} bits")
    elif isinstance(override, Mapping):
        declared = (override.get("bits", bits), override.get("group_size", group_size))
        if declared != (bits, group_size) or override.get("mode", "affine") != "affine":
            problems.append(
                f"config.json says that {path} has {declared[0]} bits in groups of {declared[1]} (mode "
                f"{override.get('mode', 'affine')}), but its shapes say {bits} bits in groups of {group_size}"
            )
    return bits, group_size


def _check_default(config: ModelConfig, encodings: Mapping[str, tuple[int, int]], problems: list[str]) -> None:
    """Checks that most weights without an entry of their own are quantised as the configuration says.

    Not all of them: converters name single weights by other prefixes, and the shapes tell their real bits.
    """
    if not encodings:
        return
    bits, group_size = collections.Counter(encodings.values()).most_common(1)[0][0]
    declared = (config.quantization.get("bits", bits), config.quantization.get("group_size", group_size))
    if declared != (bits, group_size):
        problems.append(
            f"config.json says quantization bits {declared[0]!r} in groups of {declared[1]!r}, but the shapes of most "
            f"weights say {bits} bits in groups of {group_size}: correct the config"
        )


def _dtype(tensors: CheckpointTensors, name: str) -> str:
    return str(tensors.dtype(name)).rpartition(".")[2]


def _list(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"


class TensorSource(Protocol):
    """Hands out tensors by canonical name."""

    def take(self, name: str) -> mx.array: ...


def assemble(
    tensors: TensorSource,
    encodings: Mapping[str, tuple[int, int]],
    config: ModelConfig,
    evaluate: Callable[[list[mx.array]], object],
    on_packed: OnPacked | None = None,
) -> ModelWeights:
    """Joins tensors into the kernels' layout, one layer at a time.

    Args:
        tensors: holds every tensor that `layout` lists, in its shape.
        encodings: (bits, group size) of each weight that may be quantised.
        evaluate: called with the arrays of each finished layer.
        on_packed: see `load_weights`.
    """
    return _Assembler(tensors, encodings, config, evaluate, on_packed).model()


class _Assembler:
    def __init__(
        self,
        tensors: TensorSource,
        encodings: Mapping[str, tuple[int, int]],
        config: ModelConfig,
        evaluate: Callable[[list[mx.array]], object],
        on_packed: OnPacked | None,
    ):
        self._tensors = tensors
        self._encodings = encodings
        self._config = config
        self._evaluate = evaluate
        self._on_packed = on_packed
        self._packed: dict[str, QuantizedWeight] = {}  # of the layer at work
        self._rounded = False

    def model(self) -> ModelWeights:
        embedding = self._done(self._linear("embed_tokens"))
        layers = tuple(self._done(self._layer(i)) for i in range(self._config.layers))
        norm = self._done(self._bfloat16("norm.weight"))
        head = embedding if self._config.tied else self._done(self._linear("lm_head"))
        return ModelWeights(embedding, layers, norm, head)

    def _done(self, tree: Tree) -> Tree:
        arrays = arrays_of(tree)
        self._evaluate(arrays)
        used = {id(array) for array in arrays}
        packed, self._packed = self._packed, {}
        for path, weight in packed.items():
            if self._on_packed is not None and id(weight.packed) in used:
                self._on_packed(path, weight)
        return tree

    def _layer(self, index: int) -> LayerWeights:
        layer = f"layers.{index}"
        mixer = self._attention(layer) if self._config.is_attention(index) else self._deltanet(layer)
        return LayerWeights(mixer, self._mlp(layer) if index in self._config.dense_layers else self._moe(layer))

    def _deltanet(self, layer: str) -> DeltaNetWeights:
        mixer = f"{layer}.linear_attn"
        conv = self._bfloat16(f"{mixer}.conv1d.weight")
        in_proj, gate_proj = self._deltanet_projections(mixer)
        return DeltaNetWeights(
            in_norm=self._bfloat16(f"{layer}.input_layernorm.weight"),
            in_proj=in_proj,
            conv=mx.contiguous(conv.squeeze(-1).T),
            a_log=self._tensors.take(f"{mixer}.A_log").astype(mx.float32),
            dt_bias=self._tensors.take(f"{mixer}.dt_bias").astype(mx.float32),
            out_norm=self._bfloat16(f"{mixer}.norm.weight"),
            out_proj=self._linear(f"{mixer}.out_proj"),
            gate_proj=gate_proj,
        )

    def _deltanet_projections(self, mixer: str) -> tuple[QuantizedWeight, QuantizedWeight | None]:
        """The rows q | k | v | z | b | a, or the last two apart."""
        if self._config.interleaves_heads:
            wide, narrow = interleaved_rows(self._config)
            values = [take_rows(self._linear(f"{mixer}.in_proj_qkvz"), wide)]
            gates = [take_rows(self._linear(f"{mixer}.in_proj_ba"), narrow)]
        else:
            values, gates = (
                [self._linear(f"{mixer}.in_proj_{part}") for part in parts] for parts in (("qkv", "z"), "ba")
            )
        if all(part.is_quantized for part in values) and not all(part.is_quantized for part in gates):
            return join_rows(values), join_rows(gates)
        return join_rows([*values, *gates]), None

    def _attention(self, layer: str) -> AttentionWeights:
        mixer = f"{layer}.self_attn"
        return AttentionWeights(
            in_norm=self._bfloat16(f"{layer}.input_layernorm.weight"),
            in_proj=join_rows([self._linear(f"{mixer}.{part}_proj") for part in ("q", "k", "v")]),
            q_norm=self._bfloat16(f"{mixer}.q_norm.weight"),
            k_norm=self._bfloat16(f"{mixer}.k_norm.weight"),
            out_proj=self._linear(f"{mixer}.o_proj"),
        )

    def _moe(self, layer: str) -> MoEWeights:
        mlp = f"{layer}.mlp"
        gate, up = self._alike(f"{mlp}.switch_mlp.gate_proj", f"{mlp}.switch_mlp.up_proj")
        shared_gate, shared_up = self._alike(f"{mlp}.shared_expert.gate_proj", f"{mlp}.shared_expert.up_proj")
        experts = ExpertWeights(
            gate=gate,
            up=up,
            down=self._linear(f"{mlp}.switch_mlp.down_proj"),
            shared_gate=shared_gate,
            shared_up=shared_up,
            shared_down=self._linear(f"{mlp}.shared_expert.down_proj"),
        )
        router = join_rows([self._linear(f"{mlp}.gate"), self._linear(f"{mlp}.shared_expert_gate")])
        return MoEWeights(self._bfloat16(f"{layer}.post_attention_layernorm.weight"), router, experts)

    def _mlp(self, layer: str) -> MLPWeights:
        gate, up = self._alike(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
        norm = self._bfloat16(f"{layer}.post_attention_layernorm.weight")
        return MLPWeights(norm, gate, up, self._linear(f"{layer}.mlp.down_proj"))

    def _alike(self, *paths: str) -> list[QuantizedWeight]:
        """Weights that one kernel reads together, in the same bits and groups."""
        return alike([self._linear(path) for path in paths])

    def _linear(self, path: str) -> QuantizedWeight:
        bits, group_size = self._encodings[path]
        if bits == BFLOAT16_BITS:
            weight = QuantizedWeight.from_bfloat16(self._bfloat16(f"{path}.weight"))
        else:
            weight = QuantizedWeight.pack(
                self._tensors.take(f"{path}.weight"),
                self._bfloat16(f"{path}.scales"),
                self._bfloat16(f"{path}.biases"),
                bits,
                group_size,
            )
        self._packed[path] = weight
        return weight

    def _bfloat16(self, name: str) -> mx.array:
        array = self._tensors.take(name)
        if array.dtype != mx.bfloat16 and not self._rounded:
            self._rounded = True
            logger.warning(
                "weights, norms or scales in %s are rounded to bfloat16", str(array.dtype).rpartition(".")[2]
            )
        return array.astype(mx.bfloat16)
