"""A chunk of tokens through the experts, against the reference and against the decode kernels."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels.linear import reference as linear_reference
from lily_mlx.kernels.moe import (
    Routing,
    combine,
    combine_norm,
    experts_down,
    experts_gate_up,
    grouped_down,
    grouped_gate_up,
    policy,
    reference,
    route,
    split_routing,
)
from tests.support import BFLOAT16_TOLERANCE, assert_close, bf16, rng, to_numpy

from .experts import FORMATS, UNIFORM, Format, make_experts

EPS = 1e-6


def reference_routing(routing: Routing) -> reference.Routing:
    """The routing that the GPU chose, for the reference: rows then compare one by one."""
    arrays = {field.name: to_numpy(getattr(routing, field.name)) for field in dataclasses.fields(reference.Routing)}
    return reference.Routing(**{k: v if k == "scores" else v.astype(np.int64) for k, v in arrays.items()})


def run(
    tokens: int,
    experts: int,
    top_k: int,
    intermediate: int,
    hidden: int,
    layout: Format = UNIFORM,
    tile_rows: int | None = None,
    logits: np.ndarray | None = None,
) -> None:
    generator = rng(tokens + experts)
    weights, dense = make_experts(generator, experts, intermediate, hidden, layout)
    x = bf16(generator.normal(0.0, 1.0, (tokens, hidden)))
    residual = bf16(generator.normal(0.0, 0.1, (tokens, hidden)))
    if logits is None:
        logits = generator.normal(0.0, 2.0, (tokens, experts + 1))
    routing = route(mx.array(logits.astype(np.float32)), top_k, True, tile_rows)
    same = reference_routing(routing)

    gate_up = grouped_gate_up(x, routing, weights)
    want = reference.grouped_gate_up(to_numpy(x), same, dense)
    assert_close("hidden", gate_up, want, BFLOAT16_TOLERANCE / 2)
    down = grouped_down(gate_up, routing, weights)
    want = reference.grouped_down(to_numpy(gate_up), same, dense)
    assert_close("outputs", down, want, BFLOAT16_TOLERANCE / 2)
    out = combine(down, routing, residual)
    want = reference.combine(to_numpy(down), same, to_numpy(residual))
    assert_close("out", out, want, BFLOAT16_TOLERANCE / 4)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 64, 130])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (16, 4)])
def test_chunk_lengths(tokens: int, experts: int, top_k: int) -> None:
    run(tokens, experts, top_k, 64, 64)


@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (4, 4), (33, 8), (256, 8), (20, 17)])
def test_expert_counts(experts: int, top_k: int) -> None:
    run(7, experts, top_k, 64, 64)


@pytest.mark.slow
@pytest.mark.parametrize("height", [8, 64])
def test_full_width(height: int) -> None:
    """The widths of Qwen3.6-35B-A3B, with fewer experts."""
    run(19, 4, 2, 512, 2048, tile_rows=height)


@pytest.mark.parametrize("layout", FORMATS, ids=str)
def test_formats(layout: Format) -> None:
    run(9, 6, 2, 128, 256, layout)


@pytest.mark.parametrize("height", policy.TILE_HEIGHTS)
@pytest.mark.parametrize("tokens", [1, 33, 70])
def test_tile_heights(tokens: int, height: int) -> None:
    run(tokens, 3, 2, 96, 160, Format((4, 32), (8, 32), (8, 32), (4, 32)), tile_rows=height)


@pytest.mark.parametrize(("intermediate", "hidden"), [(32, 32), (96, 32), (32, 96), (192, 320), (160, 544)])
def test_odd_widths(intermediate: int, hidden: int) -> None:
    run(5, 4, 2, intermediate, hidden, Format((4, 32), (4, 32), (8, 32), (8, 32)))


@pytest.mark.parametrize("height", [8, 32])
@pytest.mark.parametrize("expert", [0, 17, 32])
def test_one_expert_takes_all(expert: int, height: int) -> None:
    logits = np.zeros((37, 34))
    logits[:, expert] = 9.0
    run(37, 33, 1, 64, 64, tile_rows=height, logits=logits)


def test_alternating_between_first_and_last() -> None:
    logits = np.zeros((21, 257))
    logits[::2, 0] = 9.0
    logits[1::2, 255] = 9.0
    run(21, 256, 1, 64, 64, logits=logits)


@pytest.mark.parametrize("width", [8, 248, 2048, 2056, 4160])
def test_combine_of_any_width(width: int) -> None:
    """Both sides of one threadgroup's columns."""
    generator = rng(width)
    logits = generator.normal(0.0, 2.0, (3, 7)).astype(np.float32)
    routing = route(mx.array(logits), 2, True)
    outputs, residual = (
        bf16(generator.normal(0.0, 1.0, (9, width))),
        bf16(generator.normal(0.0, 1.0, (3, width))),
    )
    want = reference.combine(to_numpy(outputs), reference_routing(routing), to_numpy(residual))
    assert_close("out", combine(outputs, routing, residual), want, BFLOAT16_TOLERANCE / 4)


@pytest.mark.parametrize("width", [8, 248, 256, 2048, 2056, 8192])
def test_combine_and_norm(width: int) -> None:
    """Both sides of one threadgroup's columns; the sum is that of `combine`, bit for bit."""
    generator = rng(width)
    routing = route(mx.array(generator.normal(0.0, 2.0, (5, 7)).astype(np.float32)), 2, True)
    outputs, residual = (bf16(generator.normal(0.0, 1.0, (rows, width))) for rows in (15, 5))
    norm = bf16(generator.normal(1.0, 0.2, width))
    out, normed = combine_norm(outputs, routing, residual, norm, 1e-6)
    assert mx.array_equal(out, combine(outputs, routing, residual))
    assert_close("normed", normed, linear_reference.rms_norm(to_numpy(out), to_numpy(norm), 1e-6), 2**-7)


def test_a_slice_of_a_larger_array() -> None:
    """Rows that start inside a larger buffer."""
    generator = rng(1)
    weights, _ = make_experts(generator, 4, 64, 64)
    x = bf16(generator.normal(0.0, 1.0, (12, 64)))
    logits = mx.array(generator.normal(0.0, 2.0, (12, 5)).astype(np.float32))
    sliced = grouped_gate_up(x[3:10], route(logits[3:10], 2, True), weights)
    copied = grouped_gate_up(
        mx.array(np.array(x.astype(mx.float32))[3:10]).astype(mx.bfloat16),
        route(mx.array(np.array(logits)[3:10]), 2, True),
        weights,
    )
    assert mx.array_equal(sliced, copied).item()


@pytest.mark.parametrize(
    ("intermediate", "hidden", "layout", "height"),
    [(64, 64, UNIFORM, height) for height in policy.TILE_HEIGHTS] + [(128, 256, FORMATS[0], 8)],
    ids=str,
)
def test_decode_and_prefill_agree(intermediate: int, hidden: int, layout: Format, height: int) -> None:
    """The same tokens one at a time and as a chunk."""
    generator = rng(2)
    tokens, experts, top_k = 6, 16, 4
    weights, _ = make_experts(generator, experts, intermediate, hidden, layout)
    x = bf16(generator.normal(0.0, 1.0, (tokens, hidden)))
    gain = bf16(generator.uniform(0.5, 1.5, hidden))
    logits = mx.array(generator.normal(0.0, 2.0, (tokens, experts + 1)).astype(np.float32))
    residual = bf16(generator.normal(0.0, 0.1, (tokens, hidden)))
    routing = route(logits, top_k, True, tile_rows=height)
    normed = bf16(reference.rms_norm(to_numpy(x), to_numpy(gain), EPS))
    down = grouped_down(grouped_gate_up(normed, routing, weights), routing, weights)
    chunk = combine(down, routing, residual)
    for token in range(tokens):
        row = slice(token, token + 1)
        step = experts_gate_up(x[row], gain, logits[row], weights, top_k, EPS, True)
        chosen, scores = split_routing(step[1])
        assert mx.array_equal(chosen, routing.experts[token]).item()
        assert mx.array_equal(scores, routing.scores[token]).item()
        out = experts_down(*step, weights, residual[row])
        assert_close(f"token {token}", chunk[row], to_numpy(out), BFLOAT16_TOLERANCE / 2)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (mx.zeros((4, 64), mx.bfloat16), "x is .* expected .*\\(3, 64\\)"),
        (mx.zeros((3, 32), mx.bfloat16), "x is"),
        (mx.zeros((3, 64)), "x is .*float32"),
    ],
    ids=["rows", "columns", "float32"],
)
def test_input_errors(x: mx.array, message: str) -> None:
    weights, _ = make_experts(rng(3), 4, 64, 64)
    routing = route(mx.zeros((3, 5)), 2, True)
    with pytest.raises(ValueError, match=message):
        grouped_gate_up(x, routing, weights)
    with pytest.raises(ValueError, match=r"hidden is .* expected .*\(9, 64\)"):
        grouped_down(mx.zeros((8, 64), mx.bfloat16), routing, weights)
    with pytest.raises(ValueError, match=r"outputs is .* expected"):
        combine(mx.zeros((8, 64), mx.bfloat16), routing, mx.zeros((3, 64), mx.bfloat16))
    with pytest.raises(ValueError, match="residual has shape"):
        combine(mx.zeros((9, 60), mx.bfloat16), routing, mx.zeros((3, 60), mx.bfloat16))
    with pytest.raises(ValueError, match=r"norm_weight is .* expected .*\(64,\)"):
        combine_norm(*combined(9, 3, 64, routing), mx.zeros(32, mx.bfloat16), 1e-6)
    with pytest.raises(ValueError, match="8200 columns; combine_norm takes at most 8192"):
        combine_norm(*combined(9, 3, 8200, routing), mx.zeros(8200, mx.bfloat16), 1e-6)


def combined(rows: int, tokens: int, width: int, routing: Routing) -> tuple[mx.array, Routing, mx.array]:
    """Outputs, routing and residual for `combine`."""
    return mx.zeros((rows, width), mx.bfloat16), routing, mx.zeros((tokens, width), mx.bfloat16)


def test_routing_of_another_model() -> None:
    weights, _ = make_experts(rng(4), 4, 64, 64)
    with pytest.raises(ValueError, match="routing is for 8 experts and the weights hold 4"):
        grouped_gate_up(mx.zeros((3, 64), mx.bfloat16), route(mx.zeros((3, 9)), 2, True), weights)
