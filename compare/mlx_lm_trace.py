"""mlx-lm's decode step and prefill chunk as MLX would launch them on Metal, traced on any machine.

On a machine without a GPU some MLX functions take another path (a fused operation falls apart into its
fallback), so the trace replaces them by placeholder kernels with the same outputs, one for each launch
that Metal makes. Everything else is what mlx-lm itself records.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .full_size import configuration
from .graph import Graph, Primitive, trace

PLACEHOLDER = "mlx_"


def placeholder(name: str, inputs: Sequence[mx.array], shapes: Sequence[Any], dtypes: Sequence[mx.Dtype]):
    """A kernel that stands for one launch of MLX's `name`."""
    kernel = mx.fast.metal_kernel(
        name=PLACEHOLDER + name,
        input_names=[f"input{i}" for i in range(len(inputs))],
        output_names=[f"output{i}" for i in range(len(shapes))],
        source="uint i = thread_position_in_grid.x;",
    )
    return kernel(
        inputs=list(inputs),
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[tuple(shape) for shape in shapes],
        output_dtypes=list(dtypes),
    )


def _same(name: str):
    """A placeholder for a function whose output looks like its first argument."""

    def call(x: mx.array, *others: Any, **_: Any) -> mx.array:
        arrays = [x, *(o for o in others if isinstance(o, mx.array))]
        return placeholder(name, arrays, [x.shape], [x.dtype])[0]

    return call


def _attention(q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
    # One query row over a long cache takes MLX's two-pass kernel: partial results, then their merge.
    shape = (*q.shape[:-1], v.shape[-1])
    if q.shape[2] <= 8 and k.shape[2] >= 1024:
        (partial,) = placeholder("sdpa_vector_2pass_1", [q, k, v], [(*shape, 128)], [mx.float32])
        return placeholder("sdpa_vector_2pass_2", [partial], [shape], [q.dtype])[0]
    return placeholder("sdpa", [q, k, v], [shape], [q.dtype])[0]


def _dequantize(weight: mx.array, scales: mx.array, biases: mx.array, group_size: int, **_: Any) -> mx.array:
    shape = (*scales.shape[:-1], scales.shape[-1] * group_size)
    return placeholder("dequantize", [weight, scales, biases], [shape], [scales.dtype])[0]


def _compute_g(A_log: mx.array, a: mx.array, dt_bias: mx.array) -> mx.array:
    return placeholder("compiled_compute_g", [A_log, a, dt_bias], [a.shape], [mx.float32])[0]


def _silu(x: mx.array) -> mx.array:
    return _same("compiled_silu")(x)


def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return placeholder("compiled_swiglu", [gate, x], [x.shape], [x.dtype])[0]


def _precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    return placeholder("compiled_precise_swiglu", [h, gate, x], [h.shape], [h.dtype])[0]


@contextlib.contextmanager
def _metal_functions() -> Iterator[None]:
    """MLX and mlx-lm as they behave on Metal, as far as the graph of this model goes."""
    # Imported before anything is replaced: mlx-lm makes its stream for the default device when it is imported.
    from mlx_lm.models import gated_delta, qwen3_5, qwen3_next, switch_layers

    with contextlib.ExitStack() as stack:

        def replace(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        replace(mx.metal, "is_available", lambda: True)
        replace(mx, "default_device", lambda: mx.gpu)
        replace(gated_delta, "_gated_delta_kernel", gated_delta._make_gated_delta_kernel())
        replace(gated_delta, "_gated_delta_kernel_packed", gated_delta._make_gated_delta_packed_kernel())
        replace(gated_delta, "compute_g", _compute_g)
        replace(mx.fast, "rms_norm", _same("rms_norm"))
        replace(mx.fast, "rope", _same("rope"))
        replace(mx.fast, "scaled_dot_product_attention", _attention)
        replace(mx, "contiguous", _same("contiguous"))
        replace(mx, "dequantize", _dequantize)
        replace(nn, "silu", _silu)
        replace(qwen3_next, "swiglu", _swiglu)
        replace(qwen3_next, "precise_swiglu", _precise_swiglu)
        replace(switch_layers, "swiglu", _swiglu)
        replace(qwen3_5.nn, "silu", _silu)
        yield


def launches_of(primitive: Primitive) -> int:
    """Launches that MLX makes for one primitive on Metal."""
    if primitive.name == "Concatenate":
        return len(primitive.inputs)  # one copy for each input
    return 1


def build(config: dict[str, Any]) -> nn.Module:
    """mlx-lm's model for a configuration. Its arrays are not evaluated, so it takes no memory."""
    from mlx_lm.models.qwen3_5_moe import Model, ModelArgs

    model = Model(ModelArgs.from_dict(config))

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        return config["quantization"].get(path, True)  # type: ignore[no-any-return]

    nn.quantize(model, group_size=64, bits=4, class_predicate=predicate)
    parameters = [
        (name, value.astype(mx.bfloat16) if value.dtype == mx.float32 and "A_log" not in name else value)
        for name, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(parameters))
    model.eval()
    return model


def step_graph(rows: int, context: int, layers: int = 40) -> Graph:
    """The graph of `rows` new tokens after `context` cached ones, to the argmax of the last row."""
    with _metal_functions():
        model = build(configuration(layers))
        parameters = tree_flatten(model.parameters())
        names = [name for name, _ in parameters]
        caches = model.make_cache()
        state: list[mx.array] = []
        capacity = math.ceil((context + rows) / 256) * 256
        for cache in caches:
            if hasattr(cache, "keys"):
                shape = (1, 2, capacity, 256)
                state += [mx.zeros(shape, dtype=mx.bfloat16), mx.zeros(shape, dtype=mx.bfloat16)]
            else:
                state += [mx.zeros((1, 3, 8192), dtype=mx.bfloat16), mx.zeros((1, 32, 128, 128))]

        def step(tokens: mx.array, *arrays: mx.array) -> list[mx.array]:
            model.update(tree_unflatten(list(zip(names, arrays[: len(names)], strict=True))))
            rest = list(arrays[len(names) :])
            for cache in caches:
                first, second = rest.pop(0), rest.pop(0)
                if hasattr(cache, "keys"):
                    cache.keys, cache.values, cache.offset = first, second, context
                else:
                    cache[0], cache[1] = first, second
            logits = model(tokens, cache=caches)[:, -1, :]
            outputs = [mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)]
            for cache in caches:
                outputs += [cache.keys, cache.values] if hasattr(cache, "keys") else [cache[0], cache[1]]
            return outputs

        tokens = mx.zeros((1, rows), dtype=mx.uint32)
        return trace(step, [tokens, *(value for _, value in parameters), *state])
