"""Checks of the Gated DeltaNet kernels."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from lily_mlx.fallback import kernel
from lily_mlx.kernels.deltanet import DeltaNetShape, policy, reference

from .check import FLOAT32, Check, Output, close, equal
from .inputs import Source, expected, to_float64
from .sizes import EPS, Sizes

_MOST_SCANNED = 64  # tokens of the scan that the reference repeats one by one


def checks(sizes: Sizes) -> Iterator[Check]:
    """All checks of the family."""
    shape = sizes.deltanet
    label = f"{shape.key_heads} key and {shape.value_heads} value heads"
    yield Check("deltanet.step", label, lambda: _step(shape))
    yield Check("deltanet.batch_step", f"3 sequences, {label}", lambda: _batch_step(shape, 3))
    for rows in sizes.rows:
        if policy.is_short(rows):
            yield Check("deltanet.short_chunk", f"{rows} rows, {label}", lambda r=rows: _short_chunk(shape, r))  # type: ignore[misc]
        yield Check("deltanet.prepare", f"{rows} rows, {label}", lambda r=rows: _prepare(shape, r))  # type: ignore[misc]
        yield Check("deltanet.gated_norm", f"{rows} rows, {label}", lambda r=rows: _gated_norm(shape, r))  # type: ignore[misc]
        yield Check("deltanet.scan", f"{rows} rows, {label}", lambda r=rows: _scan(shape, r))  # type: ignore[misc]


def _layer(source: Source, shape: DeltaNetShape) -> tuple[mx.array, ...]:
    """Window, weight and gates of the convolution."""
    return (
        source.normal(shape.conv_kernel - 1, shape.channels),
        0.5 * source.normal(shape.conv_kernel, shape.channels),
        source.uniform(-2, 2, shape.value_heads),
        source.normal(shape.value_heads, dtype=mx.float32),
    )


def _state(source: Source, shape: DeltaNetShape) -> mx.array:
    return source.normal(shape.value_heads, shape.value_dim, shape.key_dim, dtype=mx.float32)


def _step(shape: DeltaNetShape) -> list[Output]:
    source = Source("step")
    proj, (conv, *layer), state = source.normal(1, shape.projection_width), _layer(source, shape), _state(source, shape)
    y, next_conv, next_state = kernel("deltanet.step")(proj, conv, state, *layer, shape)
    want = expected(reference.step, proj, conv, state, *layer, shape)
    # q, k and v are rounded to bfloat16 before they meet the state.
    return [close("y", y, want[0]), equal("conv_state", next_conv, want[1]), close("state", next_state, want[2], 1e-2)]


def _batch_step(shape: DeltaNetShape, sequences: int) -> list[Output]:
    source = Source("batch_step")
    proj, (_, *layer) = source.normal(sequences, shape.projection_width), _layer(source, shape)
    layer = [*layer, source.gain(shape.value_dim)]
    windows = source.normal(sequences, shape.conv_kernel - 1, shape.channels)
    states = mx.stack([_state(source, shape) for _ in range(sequences)])
    out, next_windows, next_states = kernel("deltanet.batch_step")(proj, windows, states, *layer, shape, EPS)
    want = expected(reference.batch_step, proj, windows, states, *layer, shape, EPS)
    return [
        close("out", out, want[0]),
        equal("conv_state", next_windows, want[1]),
        close("state", next_states, want[2], 1e-2),
    ]


def _short_chunk(shape: DeltaNetShape, rows: int) -> list[Output]:
    source = Source(f"short_chunk {rows}")
    proj, (conv, *layer) = source.normal(rows, shape.projection_width), _layer(source, shape)
    layer, state = [*layer, source.gain(shape.value_dim)], _state(source, shape)
    out, next_conv, next_state = kernel("deltanet.short_chunk")(proj, conv, state, *layer, shape, EPS)
    want = expected(reference.short_chunk, proj, conv, state, *layer, shape, EPS)
    return [
        close("out", out, want[0]),
        equal("conv_state", next_conv, want[1]),
        close("state", next_state, want[2], 1e-2),
    ]


def _prepare(shape: DeltaNetShape, rows: int) -> list[Output]:
    source = Source(f"prepare {rows}")
    proj, layer = source.normal(rows, shape.projection_width), _layer(source, shape)
    got = kernel("deltanet.prepare")(proj, *layer, shape)
    want = expected(reference.prepare, proj, *layer, shape)
    names = ("q", "k", "v", "decay", "beta")
    return [
        *(close(name, ours, theirs) for name, ours, theirs in zip(names, got, want, strict=False)),
        equal("conv_state", got[5], want[5]),
    ]


def _gated_norm(shape: DeltaNetShape, rows: int) -> list[Output]:
    source = Source(f"gated_norm {rows}")
    proj, gain = source.normal(rows, shape.projection_width), source.gain(shape.value_dim)
    y = source.normal(rows, shape.value_heads * shape.value_dim)
    got = kernel("deltanet.gated_norm")(y, proj, gain, shape, EPS)
    return [close("out", got, expected(reference.gated_norm, y, proj, gain, shape, EPS))]


def _scan(shape: DeltaNetShape, rows: int) -> list[Output]:
    """A long chunk is compared at its beginning; its end must be that of two shorter ones, bit for bit."""
    source = Source(f"scan {rows}")
    q, k = (
        source.normal(rows, shape.key_heads, shape.key_dim, dtype=mx.float32) / shape.key_dim**0.5 for _ in range(2)
    )
    q, k = q.astype(mx.bfloat16), k.astype(mx.bfloat16)
    v = source.normal(rows, shape.value_heads, shape.value_dim)
    decay, beta = (source.uniform(0, 1, rows, shape.value_heads) for _ in range(2))
    inputs, state = (q, k, v, decay, beta), _state(source, shape)
    scan = kernel("deltanet.scan")
    y, end = scan(*inputs, state, shape)
    count = min(rows, _MOST_SCANNED)
    first = [array[:count] for array in inputs]
    want_y, want_state = expected(reference.scan, *first, state, shape)
    outputs = [close("y", y[:count], want_y)]
    if count == rows:
        return [*outputs, close("state", end, want_state, FLOAT32)]
    _, middle = scan(*first, state, shape)
    _, last = scan(*(array[count:] for array in inputs), middle, shape)
    return [*outputs, close("middle state", middle, want_state, FLOAT32), equal("state", end, to_float64(last))]
