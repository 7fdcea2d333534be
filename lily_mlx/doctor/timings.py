"""Times of the main kernels next to the MLX operations that mlx_lm runs in their place.

Both sides get the same inputs and are timed in turn. A figure here is a first impression: the same weights are read
again and again, so that small ones come from a cache. `compare.kernels` of the repository measures properly.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from lily_mlx.fallback import kernel, replacement
from lily_mlx.kernels.attention import TAIL_ROWS
from lily_mlx.kernels.linear import QuantizedWeight

from .inputs import Source
from .linear import projections
from .moe import logits_of, make_weights
from .sizes import EPS, Sizes

Call = Callable[[], object]

_ROUNDS = 5
_ROUND_SECONDS = 0.02
_MOST_CALLS = 200


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, the median of some rounds.

    Attributes:
        problem: why there are none; empty where there are.
    """

    function: str
    shape: str
    ours: float
    mlx: float
    problem: str = ""

    @property
    def ratio(self) -> float:
        """How many times faster our kernel is."""
        return self.mlx / self.ours if self.ours else 0.0


@dataclass(frozen=True)
class Pair:
    """A kernel and what it replaces, on the same inputs; `make` returns both calls."""

    function: str
    shape: str
    make: Callable[[], tuple[Call, Call]]


def time_pairs(sizes: Sizes) -> Iterator[Timing]:
    """Times every pair; one that cannot run says why."""
    for pair in pairs(sizes):
        try:
            ours, theirs = pair.make()
            times = _measure(ours, theirs)
            yield Timing(pair.function, pair.shape, *times)
        except Exception as error:
            yield Timing(pair.function, pair.shape, 0.0, 0.0, f"{type(error).__name__}: {error}")
        mx.clear_cache()


def pairs(sizes: Sizes) -> Iterator[Pair]:
    """The kernels that take most of a step's and a chunk's time."""
    delta_in, _, _, _, attention_out = projections(sizes)
    rows, context = max(sizes.rows), max(sizes.contexts)
    label = f"{sizes.top_k} of {sizes.experts} experts"
    yield Pair("linear.norm_project", delta_in.shape, lambda: _norm_project(delta_in.rows, delta_in.columns))
    yield Pair(
        "linear.project_add", attention_out.shape, lambda: _project_add(attention_out.rows, attention_out.columns)
    )
    yield Pair("sampling.head", f"{sizes.vocabulary} tokens", lambda: _head(sizes))
    yield Pair("deltanet.step", "one token", lambda: _delta(sizes, 1))
    yield Pair("attention.step", f"after {context} tokens", lambda: _step(sizes, context))
    yield Pair("moe.experts_gate_up and experts_down", label, lambda: _experts(sizes))
    chunk = f"{rows} rows"
    yield Pair("linear.matmul", f"{chunk}, {delta_in.shape}", lambda: _matmul(delta_in.rows, delta_in.columns, rows))
    yield Pair("deltanet.prepare and scan", chunk, lambda: _delta(sizes, rows))
    yield Pair("attention.prefill_attention", f"{chunk} after {context} tokens", lambda: _prefill(sizes, rows, context))
    yield Pair("moe.grouped_gate_up and grouped_down", f"{chunk}, {label}", lambda: _grouped(sizes, rows))


def _measure(ours: Call, theirs: Call) -> tuple[float, float]:
    """Milliseconds of both calls, in alternating rounds."""
    counts = []
    for call in (ours, theirs):
        mx.eval(call())
        start = time.perf_counter()
        mx.eval(call())
        counts.append(max(1, min(_MOST_CALLS, round(_ROUND_SECONDS / max(time.perf_counter() - start, 1e-6)))))
    samples: tuple[list[float], list[float]] = ([], [])
    for index in range(_ROUNDS):
        for side in (0, 1) if index % 2 == 0 else (1, 0):
            call, count = (ours, theirs)[side], counts[side]
            start = time.perf_counter()
            mx.eval([call() for _ in range(count)])
            samples[side].append((time.perf_counter() - start) / count * 1e3)
    return statistics.median(samples[0]), statistics.median(samples[1])


def _quantized(x: mx.array, w: QuantizedWeight) -> mx.array:
    return mx.quantized_matmul(x, w.weight, w.scales, w.biases, transpose=True, group_size=w.group_size, bits=w.bits)


def _gather(x: mx.array, w: QuantizedWeight, experts: mx.array, is_sorted: bool = False) -> mx.array:
    return mx.gather_qmm(
        x[:, None], w.weight, w.scales, w.biases, rhs_indices=experts, transpose=True,
        group_size=w.group_size, bits=w.bits, sorted_indices=is_sorted,
    )[:, 0]  # fmt: skip


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def _norm_project(rows: int, columns: int) -> tuple[Call, Call]:
    source = Source("norm_project")
    w, x, gain = source.weight(rows, columns), source.normal(1, columns), source.gain(columns)
    mx.eval(w.weight, w.scales, w.biases, x, gain)
    project = kernel("linear.norm_project")
    return lambda: project(x, gain, w, EPS), lambda: _quantized(mx.fast.rms_norm(x, gain, EPS), w)


def _project_add(rows: int, columns: int) -> tuple[Call, Call]:
    source = Source("project_add")
    w, x, residual = source.weight(rows, columns), source.normal(1, columns), source.normal(1, rows)
    mx.eval(w.weight, w.scales, w.biases, x, residual)
    project = kernel("linear.project_add")
    return lambda: project(x, w, residual), lambda: residual + _quantized(x, w)


def _matmul(columns: int, depth: int, rows: int) -> tuple[Call, Call]:
    source = Source("matmul")
    w, x = source.weight(columns, depth), source.normal(rows, depth)
    mx.eval(w.weight, w.scales, w.biases, x)
    matmul = kernel("linear.matmul")
    return lambda: matmul(x, w), lambda: _quantized(x, w)


def _head(sizes: Sizes) -> tuple[Call, Call]:
    source = Source("head")
    w, x, gain = (
        source.weight(sizes.vocabulary, sizes.hidden),
        source.normal(1, sizes.hidden),
        source.gain(sizes.hidden),
    )
    sampling, seed, position = mx.zeros(8), mx.zeros(1, mx.uint32), mx.zeros(1, mx.int32)
    mx.eval(w.weight, w.scales, w.biases, x, gain, sampling, seed, position)
    head, select = kernel("sampling.head"), kernel("sampling.select")

    def ours() -> object:
        _, value, index = head(x, gain, w, EPS, sampling, seed, position)
        return select(value, index, position)

    return ours, lambda: mx.argmax(_quantized(mx.fast.rms_norm(x, gain, EPS), w), axis=-1)


def _delta(sizes: Sizes, rows: int) -> tuple[Call, Call]:
    """The convolution, the gates and the delta rule; mlx_lm's own function on the other side."""
    from mlx_lm.models.gated_delta import gated_delta_update

    source, shape = Source("delta"), sizes.deltanet
    proj, conv = source.normal(rows, shape.projection_width), source.normal(shape.conv_kernel - 1, shape.channels)
    weight, a_log = 0.5 * source.normal(shape.conv_kernel, shape.channels), source.uniform(-2, 2, shape.value_heads)
    dt_bias = source.normal(shape.value_heads, dtype=mx.float32)
    state = source.normal(shape.value_heads, shape.value_dim, shape.key_dim, dtype=mx.float32)
    depthwise = mx.contiguous(weight.T[:, :, None])
    mx.eval(proj, conv, weight, a_log, dt_bias, state, depthwise)
    step, prepare, scan = (kernel(f"deltanet.{name}") for name in ("step", "prepare", "scan"))

    def ours() -> object:
        if rows == 1:
            return step(proj, conv, state, weight, a_log, dt_bias, shape)
        *parts, after = prepare(proj, conv, weight, a_log, dt_bias, shape)
        return scan(*parts, state, shape), after

    def theirs() -> object:
        x = mx.concatenate([conv, proj[:, : shape.channels]])[None]
        x = mx.conv1d(x, depthwise, groups=shape.channels)
        x = x * mx.sigmoid(x)
        width = shape.key_heads * shape.key_dim
        q, k = (x[..., i * width : (i + 1) * width].reshape(1, rows, shape.key_heads, -1) for i in (0, 1))
        v = x[..., 2 * width :].reshape(1, rows, shape.value_heads, -1)
        scale = shape.key_dim**-0.5
        q, k = scale**2 * mx.fast.rms_norm(q, None, EPS), scale * mx.fast.rms_norm(k, None, EPS)
        b, a = proj[None, :, shape.b_offset : shape.a_offset], proj[None, :, shape.a_offset :]
        return gated_delta_update(q, k, v, a, b, a_log, dt_bias, state[None])

    return ours, theirs


def _step(sizes: Sizes, context: int) -> tuple[Call, Call]:
    source, shape = Source("step"), sizes.attention
    proj, gains = source.normal(1, shape.projection_width), [source.gain(shape.head_dim) for _ in range(2)]
    cache, position = source.cache(context, shape), mx.array([context], mx.int32)
    keys, values = (source.normal(1, shape.kv_heads, context + 1, shape.head_dim) for _ in range(2))
    mx.eval(proj, gains, list(vars(cache).values()), position, keys, values)
    step, dim = kernel("attention.step"), shape.head_dim

    def theirs() -> object:
        queries, gate = mx.split(proj[0, : shape.key_offset].reshape(1, shape.query_heads, 1, 2 * dim), 2, axis=-1)
        new_keys = proj[0, shape.key_offset : shape.value_offset].reshape(1, shape.kv_heads, 1, dim)
        new_values = proj[0, shape.value_offset :].reshape(shape.kv_heads, 1, dim)
        q, k = (
            mx.fast.rope(
                mx.fast.rms_norm(x, gain, EPS),
                shape.rotary_dim,
                traditional=False,
                base=shape.rope_theta,
                scale=1.0,
                offset=position,
            )
            for x, gain in zip((queries, new_keys), gains, strict=True)
        )
        row = position % TAIL_ROWS  # into an array as small as ours, because MLX would copy a whole cache here
        tail_keys = mx.slice_update(cache.tail_keys, k[0], row, axes=(1,))
        tail_values = mx.slice_update(cache.tail_values, new_values, row, axes=(1,))
        out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=dim**-0.5)
        return (out * mx.sigmoid(gate)).reshape(1, -1), tail_keys, tail_values

    def ours() -> object:
        out, after = step(proj, *gains, position, cache, shape, EPS)
        return out, after.tail_keys, after.tail_values

    return ours, theirs


def _prefill(sizes: Sizes, rows: int, context: int) -> tuple[Call, Call]:
    source, shape = Source("prefill"), sizes.attention
    q, proj = source.normal(rows, shape.query_heads, shape.head_dim), source.normal(rows, shape.projection_width)
    total, position = context + rows, mx.array([context], mx.int32)
    cache = source.cache(total, shape)
    keys, values = (source.normal(1, shape.kv_heads, total, shape.head_dim) for _ in range(2))
    gate = source.normal(rows, shape.query_heads * shape.head_dim)
    mx.eval(q, proj, list(vars(cache).values()), position, keys, values, gate)
    attend, scale = kernel("attention.prefill_attention"), shape.head_dim**-0.5

    def theirs() -> object:
        queries = q.swapaxes(0, 1)[None]
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")
        return out.swapaxes(1, 2).reshape(rows, -1) * mx.sigmoid(gate)

    return lambda: attend(q, cache, position, proj, shape), theirs


def _experts(sizes: Sizes) -> tuple[Call, Call]:
    source = Source("experts")
    weights, x, gain = make_weights(source, sizes), source.normal(1, sizes.hidden), source.gain(sizes.hidden)
    logits = logits_of(source, sizes, 1)
    mx.eval(weights.gate_up_arrays(), weights.down_arrays(), x, gain, logits)
    gate_up, down = kernel("moe.experts_gate_up"), kernel("moe.experts_down")

    def ours() -> object:
        return down(*gate_up(x, gain, logits, weights, sizes.top_k, EPS, True), weights, x)

    def theirs() -> object:
        normed = mx.fast.rms_norm(x, gain, EPS)
        scores = mx.softmax(logits[:, :-1], axis=-1, precise=True)
        chosen = mx.argpartition(scores, kth=-sizes.top_k, axis=-1)[:, -sizes.top_k :]
        share = mx.take_along_axis(scores, chosen, axis=-1)
        share = (share / mx.sum(share, axis=-1, keepdims=True)).astype(mx.bfloat16)
        ids = chosen[0].astype(mx.uint32)
        hidden = _swiglu(_gather(normed, weights.gate, ids), _gather(normed, weights.up, ids))
        routed = mx.sum(_gather(hidden, weights.down, ids) * share.T, axis=0, keepdims=True)
        shared = _swiglu(_quantized(normed, weights.shared_gate), _quantized(normed, weights.shared_up))
        gate = mx.sigmoid(logits[:, -1:]).astype(mx.bfloat16)
        return x + routed + gate * _quantized(shared, weights.shared_down)

    return ours, theirs


def _grouped(sizes: Sizes, rows: int) -> tuple[Call, Call]:
    source = Source("grouped")
    weights, x = make_weights(source, sizes), source.normal(rows, sizes.hidden)
    routing = replacement("moe.route")(logits_of(source, sizes, rows), sizes.top_k, True)
    order = mx.argsort(routing.experts.reshape(-1))
    ids = routing.experts.reshape(-1)[order]
    mx.eval(weights.gate_up_arrays(), weights.down_arrays(), x, list(vars(routing).values())[:-1], ids)
    gate_up, down = kernel("moe.grouped_gate_up"), kernel("moe.grouped_down")

    def theirs() -> object:
        routed = x[routing.row_tokens]
        hidden = _swiglu(_gather(routed, weights.gate, ids, True), _gather(routed, weights.up, ids, True))
        shared = _swiglu(_quantized(x, weights.shared_gate), _quantized(x, weights.shared_up))
        return _gather(hidden, weights.down, ids, True), _quantized(shared, weights.shared_down)

    return lambda: down(gate_up(x, routing, weights), routing, weights), theirs
