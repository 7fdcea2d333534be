"""Weights that are not quantised: every kernel that reads a weight, with 16 bits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import linear, moe
from lily_mlx.kernels.linear import QuantizedWeight, reference
from lily_mlx.kernels.linear.weight import BFLOAT16_BITS, NO_GROUPS
from lily_mlx.kernels.moe import reference as moe_reference
from lily_mlx.kernels.sampling import head
from tests.kernels.moe.experts import Format, make_experts
from tests.support import BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE, assert_close, bf16, quantized, rng, to_numpy

EPS = 1e-6
BFLOAT16 = (BFLOAT16_BITS, NO_GROUPS)
SIZES = [(1, 32), (5, 64), (33, 96), (70, 320), (40, 2048), (9, 8192)]


def make(rows, columns, seed=0):
    generator = rng(rows + columns + seed)
    weight, _ = quantized(generator, (rows, columns), BFLOAT16_BITS)
    return generator, weight, bf16(generator.standard_normal((1, columns)))


def test_holds_the_values_themselves():
    values = bf16(rng(0).standard_normal((3, 5, 64)))
    weight = QuantizedWeight.from_bfloat16(values)
    assert (weight.bits, weight.group_size, weight.shape, weight.is_quantized) == (*BFLOAT16, (3, 5, 64), False)
    assert mx.array_equal(weight.values, values)
    assert list(weight.arrays) == ["weight"]
    np.testing.assert_array_equal(reference.dequantize(weight), to_numpy(values))
    again = QuantizedWeight(weight.packed, weight.shape, *BFLOAT16)
    assert mx.array_equal(again.values, values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param(mx.zeros((4, 64)), "float32", id="float32"),
        pytest.param(mx.zeros((4, 40), mx.bfloat16), "multiple of 32", id="columns"),
        pytest.param(mx.zeros(64, mx.bfloat16), "64", id="a vector"),
    ],
)
def test_wrong_values_are_an_error(values, words):
    with pytest.raises(ValueError, match=words):
        QuantizedWeight.from_bfloat16(values)


def test_a_quantised_weight_has_no_values():
    weight, _ = quantized(rng(0), (4, 64))
    with pytest.raises(ValueError, match="4 bits"):
        _ = weight.values


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_projections(rows, columns):
    generator, weight, x = make(rows, columns)
    gain, residual = bf16(generator.uniform(0.5, 1.5, columns)), bf16(generator.standard_normal((1, rows)))
    got = linear.norm_project(x, gain, weight, EPS, mx.float32)
    want = reference.norm_project(to_numpy(x), to_numpy(gain), weight, EPS)
    assert_close("norm_project", got, want, FLOAT32_TOLERANCE)
    want = reference.project_add(to_numpy(x), weight, to_numpy(residual))
    assert_close("project_add", linear.project_add(x, weight, residual), want, BFLOAT16_TOLERANCE / 4)


@pytest.mark.parametrize("columns", [128, 384, 4096])
def test_gated_norm_project_add(columns):
    generator, weight, y = make(35, columns)
    proj, residual = bf16(generator.standard_normal((1, columns + 24))), bf16(generator.standard_normal((1, 35)))
    gain = bf16(generator.uniform(0.5, 1.5, 128))
    got = linear.gated_norm_project_add(y, proj, 16, gain, weight, residual, EPS)
    want = reference.gated_norm_project_add(
        to_numpy(y), to_numpy(proj), 16, to_numpy(gain), weight, to_numpy(residual), EPS
    )
    assert_close("out", got, want, BFLOAT16_TOLERANCE / 4)


@pytest.mark.parametrize("rows", [1, 2, 17, 65])
@pytest.mark.parametrize(("outputs", "columns"), [(1, 32), (33, 96), (70, 320)])
def test_matmul(outputs, columns, rows):
    generator, weight, _ = make(outputs, columns)
    x, residual = bf16(generator.standard_normal((rows, columns))), bf16(generator.standard_normal((rows, outputs)))
    got = linear.matmul(x, weight, residual)
    assert_close("out", got, reference.matmul(to_numpy(x), weight, to_numpy(residual)), BFLOAT16_TOLERANCE / 4)


@pytest.mark.parametrize("columns", [32, 96, 2048])
def test_embed_copies_rows(columns):
    _, table, _ = make(11, columns)
    tokens = mx.array([10, 0, 3, 3, 4_000_000_000], mx.uint32)
    assert mx.array_equal(linear.embed(tokens, table), table.values[mx.array([10, 0, 3, 3, 10])])


@pytest.mark.parametrize(("vocabulary", "columns"), [(8, 32), (301, 256), (1000, 96)])
def test_head(vocabulary, columns):
    generator, weight, x = make(vocabulary, columns)
    gain = bf16(generator.uniform(0.5, 1.5, columns))
    logits, value, index = head(x, gain, weight, EPS, mx.zeros(8), mx.zeros(1, mx.uint32), mx.zeros(1, mx.int32))
    want = reference.norm_project(to_numpy(x), to_numpy(gain), weight, EPS)
    assert_close("logits", logits, want, FLOAT32_TOLERANCE)
    assert int(index[mx.argmax(value)].item()) == int(to_numpy(logits).argmax())


LAYOUTS = [
    pytest.param(Format(BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16), id="all"),
    pytest.param(Format((4, 64), (4, 64), BFLOAT16, BFLOAT16), id="shared expert only"),
    pytest.param(Format(BFLOAT16, BFLOAT16, (8, 32), (4, 64)), id="routed experts only"),
    pytest.param(Format((4, 64), BFLOAT16, BFLOAT16, (6, 64)), id="alternating"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_one_token(layout):
    generator = rng(3)
    weights, dense = make_experts(generator, 6, 96 * 2, 320, layout)
    x, gain = bf16(generator.standard_normal((1, 320))), bf16(generator.uniform(0.5, 1.5, 320))
    logits = generator.normal(0.0, 2.0, (1, 7)).astype(np.float32)
    hidden, routing = moe.experts_gate_up(x, gain, mx.array(logits), weights, 2, EPS, True)
    experts, scores = moe.split_routing(routing)
    want = moe_reference.experts_gate_up(to_numpy(x), to_numpy(gain), logits.astype(np.float64), dense, 2, EPS, True)
    assert_close("hidden", hidden, want[0], BFLOAT16_TOLERANCE / 2)
    residual = bf16(generator.standard_normal((1, 320)))
    got = moe.experts_down(hidden, routing, weights, residual)
    want_out = moe_reference.experts_down(
        to_numpy(hidden), to_numpy(experts), to_numpy(scores), dense, to_numpy(residual)
    )
    assert_close("out", got, want_out, BFLOAT16_TOLERANCE / 4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 21])
def test_experts_of_a_chunk(layout, tokens):
    generator = rng(tokens)
    weights, dense = make_experts(generator, 6, 64, 192, layout)
    x = bf16(generator.standard_normal((tokens, 192)))
    logits = generator.normal(0.0, 2.0, (tokens, 7)).astype(np.float32)
    routing, same = moe.route(mx.array(logits), 2, True), moe_reference.route(logits.astype(np.float64), 2, True)
    hidden = moe.grouped_gate_up(x, routing, weights)
    assert_close("hidden", hidden, moe_reference.grouped_gate_up(to_numpy(x), same, dense), BFLOAT16_TOLERANCE)
    got = moe.grouped_down(hidden, routing, weights)
    assert_close("out", got, moe_reference.grouped_down(to_numpy(hidden), same, dense), BFLOAT16_TOLERANCE)
