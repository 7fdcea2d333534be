"""The exact text of every kernel that the engine can ask for on Apple devices.

The decode step, prefill chunks and their parts are traced with `mx.export_function`, which records each kernel
with its text and needs no GPU and no weights. What is traced covers every choice that depends on a size: all
encodings of weights, both sides of each limit on the rows of a chunk, and all lengths of context; and chunks once more
with the other engine of matrix products.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from lily_mlx.checkpoints import bundled_checkpoint
from lily_mlx.engine import make_sampling
from lily_mlx.engine.row_controls import join_controls
from lily_mlx.kernels.attention import TAIL_ROWS, KVCache, capacity_for, make_work
from lily_mlx.kernels.linear.weight import BITS, GROUP_SIZES
from lily_mlx.model import (
    LayerCache,
    ModelConfig,
    ModelWeights,
    Pool,
    Sampling,
    arrays_of,
    batch_step,
    choose_token,
    decode_step,
    empty_caches,
    empty_memories,
    merge_tails,
    prefill_chunk,
    with_arrays,
)
from lily_mlx.model.abstract import abstract_weights
from lily_mlx.model.choice import choose
from lily_mlx.model.prefill import all_logits

from .. import metal_backend
from ..backend import use_backend
from ..matrix_engines import CHECKED_SHAPES, NAMES, check_product, use_matrix_engine
from ..source import KernelText
from .family import FAMILY
from .unit import ExactText

# One layer of each kind.
_LAYERS = {"num_hidden_layers": 2, "full_attention_interval": 2}
# Qwen3.6-35B-A3B, where it differs from the bundled checkpoint.
_FULL_SIZE = {
    "hidden_size": 2048,
    "vocab_size": 248_320,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262_144,
}
# Rows of a chunk: both sides of every limit that a policy has between 1 and a whole chunk.
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 256, 257, 512, 513, 1024, 2048)
CONTEXTS = (0, 1, 300, 1_000, 4_000, 8_000, 16_000, 30_000, 65_000, 131_000, 260_000)
# Rows of a batch, by the same rule; fewer than 8 sequences have arrays in another address space.
BATCHES = (2, 8, 12, 16, 24, 32, 48)
_FEW_ROWS, _FEW_BATCHES = (1, 20, 300, 2048), (2, 24)

Trace = Callable[..., Sequence[mx.array]]


@dataclass(frozen=True)
class Workload:
    """A model and what is run on it.

    Attributes:
        label: for messages.
        config: the model.
        contexts: tokens before a step or a chunk.
        rows: sizes of chunks.
        batches: sequences that decode at once.
    """

    label: str
    config: ModelConfig
    contexts: Sequence[int]
    rows: Sequence[int]
    batches: Sequence[int] = _FEW_BATCHES


def workloads(quick: bool = False) -> Iterator[Workload]:
    """Everything that is traced; `quick` leaves out other models and all encodings but those of the checkpoints."""
    full, tiny = _settings(**_FULL_SIZE), _settings()
    yield Workload("full size", ModelConfig.from_dict(full), CONTEXTS, ROWS, BATCHES)
    yield Workload("bundled checkpoint", ModelConfig.from_dict(tiny), (0, 1, 300, 2_000), ROWS, BATCHES)
    if quick:
        return
    for label, sizes in FAMILY.items():
        settings = _settings(**_FULL_SIZE | sizes)
        yield Workload(label, ModelConfig.from_dict(settings), (0, 300, 30_000), _FEW_ROWS)
    for label in ("Qwen3.6-27B", "Qwen3-Next-80B-A3B"):
        settings = {
            name: value for name, value in _settings(**_FULL_SIZE | FAMILY[label]).items() if name != "quantization"
        }
        yield Workload(f"{label}, not quantised", ModelConfig.from_dict(settings), (0,), _FEW_ROWS)
    # The shared expert may have an encoding of its own.
    for bits in BITS:
        mixed = {
            "bits": bits,
            "group_size": 64,
            **{path: {"bits": 8, "group_size": 32} for path in _shared_experts(full)},
        }
        config = ModelConfig.from_dict({**full, "quantization": mixed})
        yield Workload(f"full size, {bits} bits, shared expert 8 bits", config, (0,), _FEW_ROWS)
    for label, settings in (("full size", full), ("bundled checkpoint", tiny)):
        for bits in BITS:
            for group_size in GROUP_SIZES:
                if _narrowest(settings) % group_size:
                    continue
                encoding = {"bits": bits, "group_size": group_size}
                config = ModelConfig.from_dict({**settings, "quantization": encoding})
                yield Workload(f"{label}, {bits} bits, groups of {group_size}", config, (0, 300), _FEW_ROWS)


def collect(quick: bool = False) -> list[ExactText]:
    """The distinct texts of all workloads, in the order in which they occur first."""
    found: dict[str, str] = {}
    with use_backend("metal", tracing=True):
        for m, n, k in CHECKED_SHAPES:
            operands = [mx.zeros((m, k), mx.bfloat16), mx.zeros((n, k), mx.bfloat16)]
            for text, name in record(check_product, operands):
                found.setdefault(text, name)
        for workload in workloads(quick):
            for text, name in _texts_of(workload):
                found.setdefault(text, name)
    files = sources()
    return [exact_text(name, text, files) for text, name in found.items()]


def exact_text(name: str, text: str, files: dict[str, tuple[KernelText, str]]) -> ExactText:
    """A recorded kernel with the files that it was made from.

    Args:
        name: the name that MLX gives it.
        text: its text.
        files: kernel text and constants by name, from `sources`.
    """
    for prefix, (source, constants) in files.items():
        if name.startswith(f"custom_kernel_{prefix}"):
            return ExactText(source.name, text, source, constants)
    short = re.sub(r"^custom_kernel_(?:lily_)?(\w+?)(?:_[0-9a-f]{12})?(?:__?\w*)?$", r"\1", name)
    return ExactText(short, text)


def record(function: Trace, arguments: Sequence[mx.array]) -> list[tuple[str, str]]:
    """(text, name) of the kernels that `function(*arguments)` launches on `metal`. Nothing runs."""
    kernels: list[tuple[str, str]] = []

    def note(entry: dict[str, Any]) -> None:
        if entry["type"] == "primitive" and entry["name"] == "CustomKernel":
            name, text, *_ = entry["arguments"]
            kernels.append((str(text), str(name)))

    mx.export_function(note, function, *arguments)
    return kernels


def sources() -> dict[str, tuple[KernelText, str]]:
    """The kernel texts that `metal_backend` has built, by the name that it gives them."""
    return {
        f"lily_{text.name}_{_digest(text, constants)}": (text, constants) for text, constants in metal_backend._kernels
    }


def _digest(text: KernelText, constants: str) -> str:
    """The part of a name that `metal_backend` makes from the text."""
    return hashlib.sha256((text.digest + constants).encode()).hexdigest()[:12]


def _settings(**changes: Any) -> dict[str, Any]:
    """The bundled checkpoint's config.json with other sizes."""
    settings: dict[str, Any] = json.loads((bundled_checkpoint() / "config.json").read_text())
    settings.pop("quantization_config", None)
    inner = settings.get("text_config", settings)
    inner.pop("layer_types", None)
    inner.update(_LAYERS | changes)
    for name in [name for name, value in changes.items() if value is None]:
        del inner[name]
    settings["model_type"] = inner.get("model_type", settings["model_type"])
    return settings


def _narrowest(settings: dict[str, Any]) -> int:
    inner = settings.get("text_config", settings)
    return int(min(inner[name] for name in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size")))


def _shared_experts(settings: dict[str, Any]) -> list[str]:
    layers = settings.get("text_config", settings)["num_hidden_layers"]
    return [
        f"language_model.model.layers.{layer}.mlp.shared_expert.{part}_proj"
        for layer in range(layers)
        for part in ("gate", "up", "down")
    ]


def _texts_of(workload: Workload) -> Iterator[tuple[str, str]]:
    with use_matrix_engine(NAMES[0]):
        yield from _texts_of_engine(workload)
    with use_matrix_engine(NAMES[1]):
        weights = abstract_weights(workload.config)
        for rows in workload.rows:
            state = (weights, empty_caches(workload.config))
            yield from record(*_chunk(workload.config, state, rows, 0, last_only=False))


def _texts_of_engine(workload: Workload) -> Iterator[tuple[str, str]]:
    config = workload.config
    weights = abstract_weights(config)
    yield from record(*_choices(config, (weights, empty_caches(config))))
    for sequences in workload.batches:
        for filtered in (False, True):
            yield from record(*_batch(config, weights, sequences, filtered))
    for context in workload.contexts:
        state = (weights, _caches(config, context))
        yield from record(*_step(config, state))
        if context:
            yield from record(*_merge(context // TAIL_ROWS * TAIL_ROWS or TAIL_ROWS, state))
        for rows in workload.rows:
            if context + rows <= config.max_positions:
                for last_only in (False, True):
                    yield from record(*_chunk(config, state, rows, context, last_only))


def _caches(config: ModelConfig, context: int) -> tuple[LayerCache, ...]:
    """Caches with room for `context` tokens."""
    capacity = capacity_for(context - context % TAIL_ROWS)

    def grown(cache: LayerCache) -> LayerCache:
        if not isinstance(cache, KVCache):
            return cache
        heads, _, dim = cache.keys.shape
        main = mx.zeros((heads, capacity, dim), mx.bfloat16)
        return replace(cache, keys=main, values=main)

    return tuple(grown(cache) for cache in empty_caches(config))


State = tuple[ModelWeights, tuple[LayerCache, ...]]


def _step(config: ModelConfig, state: State) -> tuple[Trace, list[mx.array]]:
    def step(token: mx.array, position: mx.array, parameters: mx.array, seed: mx.array, *arrays: mx.array) -> Any:
        weights, caches = with_arrays(state, arrays)
        output = decode_step(weights, config, token, position, caches, Sampling(parameters, seed))
        return [output.token, output.position, output.logits, *arrays_of(output.caches)]

    inputs = [mx.zeros(1, mx.uint32), mx.zeros(1, mx.int32), mx.zeros(8), mx.zeros(1, mx.uint32)]
    return step, [*inputs, *arrays_of(state)]


def _batch(config: ModelConfig, weights: ModelWeights, sequences: int, filtered: bool) -> tuple[Trace, list[mx.array]]:
    """A step of several sequences. How long they are decides nothing but the size of a list."""
    heads = config.attention
    pages = mx.zeros((4, heads.kv_heads, TAIL_ROWS, heads.head_dim), mx.bfloat16)
    young = mx.zeros((sequences, heads.kv_heads, TAIL_ROWS, heads.head_dim), mx.bfloat16)
    layers = sum(config.is_attention(i) for i in range(config.layers))
    samplings = [make_sampling(1.0, 0, top_p=0.9 if filtered else 0.0)] * sequences
    inputs = (
        mx.zeros(sequences, mx.uint32),
        mx.zeros(sequences, mx.int32),
        make_work([0] * sequences, [[]] * sequences),
        (Pool(pages, pages, young, young),) * layers,
        empty_memories(config, sequences),
        mx.zeros((sequences, 32), mx.uint32),
        join_controls(samplings),
    )
    like = (weights, inputs)

    def step(*arrays: mx.array) -> Any:
        weights, inputs = with_arrays(like, arrays)
        return arrays_of(batch_step(weights, config, *inputs))

    return step, arrays_of(like)


def _choices(config: ModelConfig, state: State) -> tuple[Trace, list[mx.array]]:
    """The ends of a step that make_sampling leads to beside the plain one, `_step`'s."""
    filtered = make_sampling(1.0, 0, top_p=0.9, presence_penalty=1.0)
    penalised = make_sampling(0.0, 0, presence_penalty=1.0)
    inputs = mx.zeros((1, config.hidden_size), mx.bfloat16), mx.zeros(1, mx.uint32), mx.zeros(1, mx.int32)
    like = (state, filtered, penalised)

    def choices(x: mx.array, tokens: mx.array, position: mx.array, *arrays: mx.array) -> Any:
        (weights, _), *samplings = with_arrays(like, arrays)
        chosen = [choose(weights, config, x, tokens, position, sampling) for sampling in samplings]
        return arrays_of(tuple(chosen))

    return choices, [*inputs, *arrays_of(like)]


def _chunk(config: ModelConfig, state: State, rows: int, context: int, last_only: bool) -> tuple[Trace, list[mx.array]]:
    def chunk(tokens: mx.array, parameters: mx.array, seed: mx.array, *arrays: mx.array) -> Any:
        weights, caches = with_arrays(state, arrays)
        last = mx.array([context + rows - 1], mx.int32)
        x, caches = prefill_chunk(weights, config, tokens, context, caches, last=last if last_only else None)
        if not last_only:
            return [all_logits(weights, config, x), *arrays_of(caches)]
        output = choose_token(weights, config, x, context + rows, caches, Sampling(parameters, seed), last)
        return [output.token, output.logits, *arrays_of(output.caches)]

    inputs = [mx.zeros(rows, mx.uint32), mx.zeros(8), mx.zeros(1, mx.uint32)]
    return chunk, [*inputs, *arrays_of(state)]


def _merge(length: int, state: State) -> tuple[Trace, list[mx.array]]:
    caches = state[1]

    def merge(*arrays: mx.array) -> Any:
        return arrays_of(merge_tails(with_arrays(caches, arrays), length))

    return merge, arrays_of(caches)
