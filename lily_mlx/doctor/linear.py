"""Checks of the linear and sampling kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from lily_mlx.fallback import kernel
from lily_mlx.kernels.linear import QuantizedWeight, reference
from lily_mlx.kernels.sampling import NO_TOKEN, RowControls, Settings
from lily_mlx.kernels.sampling import reference as sampling_reference
from lily_mlx.kernels.sampling.policy import SLICE
from lily_mlx.kernels.sampling.settings import UNFILTERED

from .check import BFLOAT16, FLOAT32, Check, Output, close, equal
from .inputs import Source, expected, sample, take_rows, to_float64
from .sizes import EPS, Sizes

_OUTPUTS = 64  # outputs and rows that are compared where all are too many
_ROWS = 12
# An input of a float32 product may round to the other neighbour in bfloat16 than in the reference.
_ROUNDED_INPUT = 5e-4


@dataclass(frozen=True)
class Projection:
    """A quantised weight [rows, columns] of the model."""

    label: str
    rows: int
    columns: int
    bits: int = 4

    @property
    def shape(self) -> str:
        return f"{self.label} [{self.rows}, {self.columns}] {self.bits} bits"

    @property
    def dtype(self) -> mx.Dtype:
        return mx.float32 if self.label == "router" else mx.bfloat16

    @property
    def adds(self) -> bool:
        """Whether the residual is added to its output."""
        return self.label.endswith("output")

    def weight(self, source: Source) -> QuantizedWeight:
        return source.weight(self.rows, self.columns, bits=self.bits)


def projections(sizes: Sizes) -> tuple[Projection, ...]:
    """The joined projections of a layer."""
    attention, delta = sizes.attention, sizes.deltanet
    return (
        Projection("deltanet input", delta.projection_width, sizes.hidden),
        Projection("attention input", attention.projection_width, sizes.hidden),
        Projection("router", sizes.experts + 1, sizes.hidden, bits=8),
        Projection("deltanet output", sizes.hidden, delta.value_heads * delta.value_dim),
        Projection("attention output", sizes.hidden, attention.query_heads * attention.head_dim),
    )


def checks(sizes: Sizes) -> Iterator[Check]:
    """All checks of the two families."""
    for projection in projections(sizes):
        if not projection.adds:
            yield Check("linear.norm_project", projection.shape, lambda p=projection: _norm_project(p))  # type: ignore[misc]
        for rows in sizes.rows:
            shape = f"{rows} rows, {projection.shape}"
            yield Check("linear.matmul", shape, lambda p=projection, r=rows: _matmul(p, r))  # type: ignore[misc]
            if projection.label == "router":
                yield Check("linear.norm_matmul", shape, lambda p=projection, r=rows: _norm_matmul(p, r))  # type: ignore[misc]
    plain = Projection("not quantised", sizes.hidden, sizes.hidden, bits=16)
    yield Check("linear.norm_project", plain.shape, lambda: _norm_project(plain))
    yield Check("linear.matmul", f"{sizes.rows[0]} rows, {plain.shape}", lambda: _matmul(plain, sizes.rows[0]))
    *_, delta_out, attention_out = projections(sizes)
    yield Check("linear.project_add", attention_out.shape, lambda: _project_add(attention_out))
    yield Check("linear.gated_norm_project_add", delta_out.shape, lambda: _gated_norm_project_add(sizes, delta_out))
    for rows in sizes.rows:
        yield Check("linear.rms_norm", f"{rows} rows of {sizes.hidden}", lambda r=rows: _rms_norm(sizes, r))  # type: ignore[misc]
        yield Check("linear.embed", f"{rows} of {sizes.vocabulary} tokens", lambda r=rows: _embed(sizes, r))  # type: ignore[misc]
    for temperature in (0.0, 0.8):
        shape = f"{sizes.vocabulary} tokens, temperature {temperature}"
        yield Check("sampling.head", shape, lambda t=temperature: _head(sizes, t))  # type: ignore[misc]
    yield Check("sampling.select", "1000 parts", _select)
    yield Check("sampling.adjust", f"{sizes.vocabulary} tokens", lambda: _adjust(sizes))
    yield Check("sampling.draw", f"{sizes.vocabulary} tokens", lambda: _draw(sizes))
    for filtered in (False, True):
        shape = f"3 sequences{', filters' if filtered else ''}, {sizes.vocabulary} tokens"
        yield Check("sampling.choose_rows", shape, lambda f=filtered: _choose_rows(sizes, f))  # type: ignore[misc]


def _norm_project(projection: Projection) -> list[Output]:
    source = Source(projection.label)
    w, x, gain = projection.weight(source), source.normal(1, projection.columns), source.gain(projection.columns)
    got = kernel("linear.norm_project")(x, gain, w, EPS, projection.dtype)
    rows = sample(projection.rows, _OUTPUTS)
    want = reference.norm_project(to_float64(x), to_float64(gain), take_rows(w, rows), EPS)
    limit = _ROUNDED_INPUT if projection.dtype == mx.float32 else BFLOAT16
    return [close("out", got[:, mx.array(rows)], want, limit)]


def _matmul(projection: Projection, rows: int) -> list[Output]:
    source = Source(f"{projection.label} {rows}")
    w, x = projection.weight(source), source.normal(rows, projection.columns)
    residual = source.normal(rows, projection.rows) if projection.adds else None
    got = kernel("linear.matmul")(x, w, residual, projection.dtype)
    columns, taken = sample(projection.rows, _OUTPUTS), mx.array(sample(rows, _ROWS))
    # The kernel rounds the weights for the matrix instructions.
    dense = reference.round_bfloat16(reference.dequantize(take_rows(w, columns)))
    want = to_float64(x[taken]) @ dense.T
    if residual is not None:
        want = want + to_float64(residual[taken][:, mx.array(columns)])
    return [close("out", got[taken][:, mx.array(columns)], want)]


def _norm_matmul(projection: Projection, rows: int) -> list[Output]:
    source = Source(f"{projection.label} norm {rows}")
    w, x, gain = projection.weight(source), source.normal(rows, projection.columns), source.gain(projection.columns)
    got, normed = kernel("linear.norm_matmul")(x, gain, w, EPS, projection.dtype)
    columns, taken = sample(projection.rows, _OUTPUTS), mx.array(sample(rows, _ROWS))
    dense = reference.round_bfloat16(reference.dequantize(take_rows(w, columns)))
    norm = close("normed", normed, reference.rms_norm(to_float64(x), to_float64(gain), EPS))
    # The product is that of the rows that were written.
    return [norm, close("out", got[taken][:, mx.array(columns)], to_float64(normed[taken]) @ dense.T)]


def _project_add(projection: Projection) -> list[Output]:
    source = Source(projection.label)
    w, x = projection.weight(source), source.normal(1, projection.columns)
    residual = source.normal(1, projection.rows)
    got = kernel("linear.project_add")(x, w, residual)
    rows = sample(projection.rows, _OUTPUTS)
    want = reference.project_add(to_float64(x), take_rows(w, rows), to_float64(residual)[:, rows])
    return [close("out", got[:, mx.array(rows)], want)]


def _gated_norm_project_add(sizes: Sizes, projection: Projection) -> list[Output]:
    source, delta = Source(projection.label), sizes.deltanet
    w, y = projection.weight(source), source.normal(1, projection.columns)
    proj, gain = source.normal(1, delta.projection_width), source.gain(delta.value_dim)
    residual = source.normal(1, projection.rows)
    got = kernel("linear.gated_norm_project_add")(y, proj, delta.z_offset, gain, w, residual, EPS)
    rows = sample(projection.rows, _OUTPUTS)
    want = reference.gated_norm_project_add(
        to_float64(y),
        to_float64(proj),
        delta.z_offset,
        to_float64(gain),
        take_rows(w, rows),
        to_float64(residual)[:, rows],
        EPS,
    )
    return [close("out", got[:, mx.array(rows)], want)]


def _rms_norm(sizes: Sizes, rows: int) -> list[Output]:
    source = Source(f"rms_norm {rows}")
    x, gain = source.normal(rows, sizes.hidden), source.gain(sizes.hidden)
    got = kernel("linear.rms_norm")(x, gain, EPS)
    return [close("out", got, reference.rms_norm(to_float64(x), to_float64(gain), EPS))]


def _embed(sizes: Sizes, rows: int) -> list[Output]:
    source = Source(f"embed {rows}")
    table = source.weight(sizes.vocabulary, sizes.hidden)
    tokens = source.tokens(sizes.vocabulary, rows)
    got = kernel("linear.embed")(tokens, table)
    taken = sample(rows, _ROWS)
    want = reference.dequantize(take_rows(table, to_float64(tokens)[taken].tolist()))
    return [close("out", got[mx.array(taken)], want)]


def _head(sizes: Sizes, temperature: float) -> list[Output]:
    """The logits, and that the best value and token of all parts are those of the logits themselves."""
    source = Source("head")
    w, x, gain = (
        source.weight(sizes.vocabulary, sizes.hidden),
        source.normal(1, sizes.hidden),
        source.gain(sizes.hidden),
    )
    sampling = mx.array([temperature, *[0.0] * 7])
    seed, position = mx.array([5], mx.uint32), mx.array([77], mx.int32)
    logits, value, index = kernel("sampling.head")(x, gain, w, EPS, sampling, seed, position)
    rows = sample(sizes.vocabulary, 4 * _OUTPUTS)
    want = reference.norm_project(to_float64(x), to_float64(gain), take_rows(w, rows), EPS)
    outputs = [close("logits", logits[:, mx.array(rows)], want, _ROUNDED_INPUT)]
    values = to_float64(logits)[0]
    if temperature > 0:
        values = values / temperature + sampling_reference.noise(5, 77, values.size)
    best = int(to_float64(index)[np.argmax(to_float64(value))])
    behind = float(values.max() - values[best]) if 0 <= best < values.size else np.inf
    return [*outputs, Output("best token", behind / max(float(np.abs(values).max()), 1e-30), FLOAT32)]


def _select() -> list[Output]:
    source = Source("select")
    value = mx.round(4 * source.normal(1000, dtype=mx.float32))  # with ties
    index = mx.random.permutation(1000, key=mx.random.key(1)).astype(mx.uint32)
    token, position = kernel("sampling.select")(value, index, mx.array([9], mx.int32))
    want_token, want_position = sampling_reference.select(to_float64(value), to_float64(index), np.array([9]))
    return [equal("token", token, want_token), equal("position", position, want_position)]


def _adjust(sizes: Sizes) -> list[Output]:
    source = Source("adjust")
    settings = Settings(
        repetition_penalty=1.3, repetition_context_size=32, presence_penalty=0.5, presence_context_size=32
    )
    logits, recent = source.normal(1, sizes.vocabulary, dtype=mx.float32), source.tokens(sizes.vocabulary, 32)
    ids = mx.array([3, sizes.vocabulary - 1, *[NO_TOKEN] * 6], mx.uint32)
    values = mx.array([1.5, -2.0, *[0.0] * 6])
    tokens, position, seed = source.tokens(sizes.vocabulary, 3), mx.array([70], mx.int32), mx.array([1], mx.uint32)
    got = kernel("sampling.adjust")(logits, tokens, position, recent, ids, values, settings.array(), seed, False)
    adjusted, after, *_ = expected(
        sampling_reference.adjust, logits, tokens, position, recent, ids, values, settings, seed, False
    )
    parts = np.pad(adjusted[0], (0, -sizes.vocabulary % SLICE), constant_values=-np.inf).reshape(-1, SLICE)
    return [
        close("adjusted", got[0], adjusted),
        equal("recent", got[1], after),
        close("best value", got[2], parts.max(1)),
        equal("best token", got[3], parts.argmax(1) + SLICE * np.arange(len(parts))),
    ]


def _draw(sizes: Sizes) -> list[Output]:
    source = Source("draw")
    # Multiples of 1/16, so that the sums that decide what is kept are far from a tie.
    logits = mx.round(40 * source.normal(1, sizes.vocabulary, dtype=mx.float32)) / 16
    settings = Settings(temperature=1.0, min_p=0.05, top_k=40)
    padded = np.pad(np.array(logits)[0], (0, -sizes.vocabulary % SLICE), constant_values=-np.inf).reshape(-1, SLICE)
    largest = padded.max(1)
    total = np.exp(padded - largest[:, None]).sum(1)
    special = np.full(8, NO_TOKEN, np.uint32)
    seed, position = np.array([4], np.uint32), np.array([12], np.int32)
    arrays = [mx.array(x.astype(np.float32)) for x in (largest, total)]
    token, _, _ = kernel("sampling.draw")(
        logits, *arrays, mx.array(special), settings.array(), mx.array(seed), mx.array(position)
    )
    want, *_ = sampling_reference.draw(np.array(logits), largest, total, special[:0], settings, seed, position)
    return [equal("token", token, want)]


def _choose_rows(sizes: Sizes, filtered: bool) -> list[Output]:
    source = Source("choose_rows")
    settings = [
        Settings(),
        Settings(temperature=1.0, min_p=0.05, top_k=40) if filtered else Settings(temperature=1.0),
        Settings(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5),
    ]
    count = len(settings)
    # Multiples of 1/16, as in _draw.
    logits = mx.round(40 * source.normal(count, sizes.vocabulary, dtype=mx.float32)) / 16
    tokens, recent = source.tokens(sizes.vocabulary, count), source.tokens(sizes.vocabulary, 32 * count)
    position, seed = mx.array([40, 7, 300], mx.int32), mx.array([1, 2, 3], mx.uint32)
    ids = mx.array([[3, sizes.vocabulary - 1, *[NO_TOKEN] * 6]] * count, mx.uint32)
    biases, special = mx.array([[1.5, -2.0, *[0.0] * 6]] * count), mx.full((count, 8), NO_TOKEN, mx.uint32)
    values = np.stack([one.values() for one in settings])
    values[:, UNFILTERED] = [filtered and not one.filters for one in settings]
    controls = RowControls(mx.array(values), seed, ids, biases, special, filtered)
    recent = recent.reshape(count, 32)
    got = kernel("sampling.choose_rows")(logits, tokens, position, recent, controls)
    want = expected(
        sampling_reference.choose_rows, logits, tokens, position, recent, settings, seed, ids, biases, special
    )
    return [equal("token", got[0], want[0]), close("adjusted", got[1], want[1]), equal("recent", got[2], want[2])]
