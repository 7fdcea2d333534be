"""Checks of the mixture-of-experts kernels. Routings come from MLX operations, so that each kernel stands alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import mlx.core as mx
import numpy as np

from lily_mlx.fallback import kernel, replacement
from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear import reference as linear_reference
from lily_mlx.kernels.moe import ExpertWeights, Routing, join_routing, reference, split_routing
from lily_mlx.kernels.moe.policy import ONE_LAUNCH_ROWS

from .check import Check, Output, close, equal
from .inputs import Source, sample, take_expert, take_rows, to_float64
from .sizes import EPS, Sizes

_OUTPUTS = 48
_ROUTED_ROWS, _SHARED_ROWS = 12, 4


def checks(sizes: Sizes) -> Iterator[Check]:
    """All checks of the family."""
    label = f"{sizes.top_k} of {sizes.experts} experts [{sizes.expert_size}, {sizes.hidden}]"
    yield Check("moe.experts_gate_up", label, lambda: _gate_up(sizes))
    yield Check("moe.experts_down", label, lambda: _down(sizes))
    # Chunks on both sides of one launch.
    for rows in (*sizes.rows, *[ONE_LAUNCH_ROWS + 1] * (max(sizes.rows) <= ONE_LAUNCH_ROWS)):
        yield Check("moe.route", f"{rows} rows, {label}", lambda r=rows: _route(sizes, r))  # type: ignore[misc]
    for rows in sizes.rows:
        shape = f"{rows} rows, {label}"
        yield Check("moe.grouped_gate_up", shape, lambda r=rows: _grouped_gate_up(sizes, r))  # type: ignore[misc]
        yield Check("moe.grouped_down", shape, lambda r=rows: _grouped_down(sizes, r))  # type: ignore[misc]
        yield Check("moe.combine", shape, lambda r=rows: _combine(sizes, r))  # type: ignore[misc]
        yield Check("moe.combine_norm", shape, lambda r=rows: _combine_norm(sizes, r))  # type: ignore[misc]


def make_weights(source: Source, sizes: Sizes) -> ExpertWeights:
    """Random experts."""
    experts, inner, hidden = sizes.experts, sizes.expert_size, sizes.hidden
    return ExpertWeights(
        gate=source.weight(experts, inner, hidden),
        up=source.weight(experts, inner, hidden),
        down=source.weight(experts, hidden, inner),
        shared_gate=source.weight(inner, hidden),
        shared_up=source.weight(inner, hidden),
        shared_down=source.weight(hidden, inner),
    )


def logits_of(source: Source, sizes: Sizes, rows: int) -> mx.array:
    return 2 * source.normal(rows, sizes.experts + 1, dtype=mx.float32)


def _dense(w: QuantizedWeight, expert: int | None, rows: list[int]) -> np.ndarray:
    """Some rows of an expert's matrix, or of the shared expert's."""
    return linear_reference.dequantize(take_rows(w if expert is None else take_expert(w, expert), rows))


def _swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.asarray(reference.silu(gate @ x) * (up @ x))


def _gate_up(sizes: Sizes) -> list[Output]:
    source = Source("gate_up")
    weights, x, gain = make_weights(source, sizes), source.normal(1, sizes.hidden), source.gain(sizes.hidden)
    logits = logits_of(source, sizes, 1)
    hidden, routing = kernel("moe.experts_gate_up")(x, gain, logits, weights, sizes.top_k, EPS, True)
    experts, scores = split_routing(routing)
    want_experts, want_scores = reference.select_experts(to_float64(logits), sizes.top_k, True)
    columns = sample(sizes.expert_size, _OUTPUTS)
    normed = reference.rms_norm(to_float64(x), to_float64(gain), EPS)[0]
    want = [
        _swiglu(normed, _dense(weights.gate, int(e), columns), _dense(weights.up, int(e), columns))
        for e in want_experts[0]
    ]
    shared = (_dense(w, None, columns) for w in (weights.shared_gate, weights.shared_up))
    want.append(_swiglu(normed, *shared))
    return [
        equal("experts", experts, want_experts[0]),
        close("scores", scores, want_scores[0]),
        close("hidden", hidden[:, mx.array(columns)], np.stack(want)),
    ]


def _down(sizes: Sizes) -> list[Output]:
    source = Source("down")
    weights, hidden = make_weights(source, sizes), source.normal(sizes.top_k + 1, sizes.expert_size)
    experts = mx.random.permutation(sizes.experts, key=mx.random.key(2))[: sizes.top_k].astype(mx.uint32)
    scores, residual = source.uniform(0, 1, sizes.top_k + 1), source.normal(1, sizes.hidden)
    got = kernel("moe.experts_down")(hidden, join_routing(experts, scores), weights, residual)
    rows = sample(sizes.hidden, _OUTPUTS)
    want, values, share = to_float64(residual)[0, rows], to_float64(hidden), to_float64(scores)
    for slot, expert in enumerate([*to_float64(experts).tolist(), None]):
        w = weights.shared_down if expert is None else weights.down
        want = want + share[slot] * (_dense(w, expert, rows) @ values[slot])
    return [close("out", got[:, mx.array(rows)], want[None])]


def _route(sizes: Sizes, rows: int) -> list[Output]:
    logits = logits_of(Source(f"route {rows}"), sizes, rows)
    got = kernel("moe.route")(logits, sizes.top_k, True)
    want = reference.route(to_float64(logits), sizes.top_k, True)
    names = ("experts", "offsets", "row_tokens", "slot_rows")
    # Every grouped row in one block of its own expert, the shared expert's rows last.
    owner = np.full(got.rows, -1)
    for expert, first, count, _ in to_float64(got.blocks):
        owner[first : first + count] = expert
    of_pairs = np.repeat(np.arange(sizes.experts), np.diff(want.offsets))
    return [
        *(equal(name, getattr(got, name), getattr(want, name)) for name in names),
        close("scores", got.scores, want.scores),
        equal("blocks", owner, np.concatenate([of_pairs, np.full(rows, sizes.experts)])),
    ]


def _routed(source: Source, sizes: Sizes, rows: int) -> tuple[Routing, reference.Routing]:
    """A routing by MLX operations, for the kernels and for the reference."""
    routing: Routing = replacement("moe.route")(logits_of(source, sizes, rows), sizes.top_k, True)
    arrays = {field.name: to_float64(getattr(routing, field.name)) for field in fields(reference.Routing)}
    return routing, reference.Routing(**arrays)


def _sampled(routing: reference.Routing, sizes: Sizes) -> list[tuple[int, int | None]]:
    """Some grouped rows with their experts, routed ones and some of the shared expert."""
    tokens, pairs = routing.experts.shape[0], routing.row_tokens.size
    routed = [
        (row, int(np.searchsorted(routing.offsets[1:], row, side="right"))) for row in sample(pairs, _ROUTED_ROWS)
    ]
    return [*routed, *((pairs + row, None) for row in sample(tokens, _SHARED_ROWS))]


def _grouped_gate_up(sizes: Sizes, rows: int) -> list[Output]:
    source = Source(f"grouped_gate_up {rows}")
    weights, x = make_weights(source, sizes), source.normal(rows, sizes.hidden)
    routing, same = _routed(source, sizes, rows)
    got = kernel("moe.grouped_gate_up")(x, routing, weights)
    columns, values, pairs = sample(sizes.expert_size, _OUTPUTS), to_float64(x), same.row_tokens.size
    taken, want = _sampled(same, sizes), []
    for row, expert in taken:
        gate, up = (weights.shared_gate, weights.shared_up) if expert is None else (weights.gate, weights.up)
        token = row - pairs if expert is None else int(same.row_tokens[row])
        want.append(_swiglu(values[token], _dense(gate, expert, columns), _dense(up, expert, columns)))
    found = got[mx.array([row for row, _ in taken])][:, mx.array(columns)]
    return [close("hidden", found, np.stack(want)), _finite(got)]


def _grouped_down(sizes: Sizes, rows: int) -> list[Output]:
    source = Source(f"grouped_down {rows}")
    weights = make_weights(source, sizes)
    routing, same = _routed(source, sizes, rows)
    hidden = source.normal(routing.rows, sizes.expert_size)
    got = kernel("moe.grouped_down")(hidden, routing, weights)
    columns, values = sample(sizes.hidden, _OUTPUTS), to_float64(hidden)
    taken = _sampled(same, sizes)
    want = [
        _dense(weights.shared_down if expert is None else weights.down, expert, columns) @ values[row]
        for row, expert in taken
    ]
    found = got[mx.array([row for row, _ in taken])][:, mx.array(columns)]
    return [close("out", found, np.stack(want)), _finite(got)]


def _combine(sizes: Sizes, rows: int) -> list[Output]:
    source = Source(f"combine {rows}")
    routing, same = _routed(source, sizes, rows)
    outputs, residual = source.normal(routing.rows, sizes.hidden), source.normal(rows, sizes.hidden)
    got = kernel("moe.combine")(outputs, routing, residual)
    return [close("out", got, reference.combine(to_float64(outputs), same, to_float64(residual)))]


def _combine_norm(sizes: Sizes, rows: int) -> list[Output]:
    source = Source(f"combine_norm {rows}")
    routing, same = _routed(source, sizes, rows)
    outputs, residual = source.normal(routing.rows, sizes.hidden), source.normal(rows, sizes.hidden)
    norm = 1 + 0.1 * source.normal(sizes.hidden)
    out, normed = kernel("moe.combine_norm")(outputs, routing, residual, norm, EPS)
    combined, _ = reference.combine_norm(to_float64(outputs), same, to_float64(residual), to_float64(norm), EPS)
    # The norm of what the kernel itself rounded: one step of bfloat16 in the sum is no error of the norm.
    want = linear_reference.rms_norm(to_float64(out), to_float64(norm), EPS)
    return [close("out", out, combined), close("normed", normed, want)]


def _finite(x: mx.array) -> Output:
    """Whether all rows were written, those that are not compared too."""
    return Output("all rows", float(not mx.all(mx.isfinite(x)).item()), 0.0)
