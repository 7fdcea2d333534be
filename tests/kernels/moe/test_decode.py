"""One token through the experts, against the reference."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels.moe import experts_down, experts_gate_up, join_routing, reference, split_routing
from tests.support import BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE, assert_close, bf16, rng, to_numpy

from .experts import FORMATS, MIXED, UNIFORM, Format, make_experts

EPS = 1e-6

# experts, top_k, intermediate, hidden
SIZES = [
    (4, 1, 64, 64),
    (4, 4, 192, 64),
    (16, 2, 64, 192),
    (16, 4, 64, 256),
    (33, 8, 64, 320),
    (256, 8, 64, 64),
    (5, 3, 576, 1088),
    (20, 17, 64, 64),
]
MIXED_SMALL = Format((4, 64), (8, 32), (8, 32), (4, 32))
ODD_GROUPS = Format((4, 32), (4, 32), (8, 32), (8, 32))


def run(
    seed: int,
    experts: int,
    top_k: int,
    intermediate: int,
    hidden: int,
    layout: Format,
    normalise: bool = True,
) -> None:
    generator = rng(seed)
    weights, dense = make_experts(generator, experts, intermediate, hidden, layout)
    x = bf16(generator.normal(0.0, 3.0, (1, hidden)))
    norm_weight = bf16(generator.uniform(0.5, 1.5, hidden))
    logits = generator.normal(0.0, 2.0, (1, experts + 1)).astype(np.float32)
    got_hidden, routing = experts_gate_up(x, norm_weight, mx.array(logits), weights, top_k, EPS, normalise)
    got = (got_hidden, *split_routing(routing))
    want = reference.experts_gate_up(
        to_numpy(x), to_numpy(norm_weight), logits.astype(np.float64), dense, top_k, EPS, normalise
    )
    assert_close("hidden", got[0], want[0], BFLOAT16_TOLERANCE / 2)
    np.testing.assert_array_equal(to_numpy(got[1]), want[1])
    assert_close("scores", got[2], want[2], FLOAT32_TOLERANCE / 10)

    residual = bf16(generator.normal(0.0, 0.1, (1, hidden)))
    out = experts_down(got_hidden, routing, weights, residual)
    want_out = reference.experts_down(to_numpy(got[0]), want[1], to_numpy(got[2]), dense, to_numpy(residual))
    assert_close("out", out, want_out, BFLOAT16_TOLERANCE / 4)


@pytest.mark.parametrize(("experts", "top_k", "intermediate", "hidden"), SIZES)
def test_sizes(experts: int, top_k: int, intermediate: int, hidden: int) -> None:
    run(experts + top_k, experts, top_k, intermediate, hidden, UNIFORM)


@pytest.mark.parametrize("layout", [*FORMATS, ODD_GROUPS], ids=str)
def test_formats(layout: Format) -> None:
    run(1, 6, 2, 128, 256, layout)


@pytest.mark.parametrize(("experts", "top_k"), [(6, 2), (40, 8)])
def test_scores_over_all_experts(experts: int, top_k: int) -> None:
    run(9, experts, top_k, 64, 64, UNIFORM, normalise=False)


@pytest.mark.parametrize(("intermediate", "hidden"), [(32, 32), (96, 32), (32, 96), (160, 544)])
def test_odd_multiples_of_32(intermediate: int, hidden: int) -> None:
    run(2, 4, 2, intermediate, hidden, ODD_GROUPS)


@pytest.mark.slow
def test_full_width() -> None:
    """The widths of Qwen3.6-35B-A3B, with fewer experts."""
    run(10, 12, 8, 512, 2048, UNIFORM)


def test_each_slot_uses_its_own_expert() -> None:
    """Equal logits choose the highest ids, highest first."""
    generator = rng(3)
    weights, dense = make_experts(generator, 64, 64, 64, MIXED_SMALL)
    x = bf16(generator.normal(0.0, 1.0, (1, 64)))
    ones = mx.ones((64,), dtype=mx.bfloat16)
    hidden, routing = experts_gate_up(x, ones, mx.zeros((1, 65)), weights, 8, EPS, True)
    experts, scores = split_routing(routing)
    assert to_numpy(experts).tolist() == [63, 62, 61, 60, 59, 58, 57, 56]
    np.testing.assert_allclose(to_numpy(scores), [0.125] * 8 + [0.5], rtol=1e-6)
    want = reference.experts_gate_up(to_numpy(x), np.ones(64), np.zeros((1, 65)), dense, 8, EPS, True)
    assert_close("hidden", hidden, want[0], BFLOAT16_TOLERANCE / 2)


def test_logits_that_are_not_numbers() -> None:
    generator = rng(4)
    weights, _ = make_experts(generator, 8, 64, 64)
    x = bf16(generator.normal(0.0, 1.0, (1, 64)))
    ones = mx.ones((64,), dtype=mx.bfloat16)
    _, routing = experts_gate_up(x, ones, mx.full((1, 9), float("nan")), weights, 4, EPS, True)
    assert to_numpy(split_routing(routing)[0]).tolist() == [7, 6, 5, 4]


def test_large_activations_saturate() -> None:
    """silu of large values of either sign is x or 0, never NaN."""
    generator = rng(5)
    weights, dense = make_experts(generator, 4, 64, 64)
    x = bf16(generator.normal(0.0, 1.0, (1, 64)))
    gain = mx.full((64,), 3000.0, dtype=mx.bfloat16)
    hidden, _ = experts_gate_up(x, gain, mx.zeros((1, 5)), weights, 2, EPS, True)
    with np.errstate(over="ignore"):
        want = reference.experts_gate_up(to_numpy(x), to_numpy(gain), np.zeros((1, 5)), dense, 2, EPS, True)
    assert_close("hidden", hidden, want[0], BFLOAT16_TOLERANCE / 2)


def test_mixed_format_is_deterministic() -> None:
    generator = rng(6)
    weights, _ = make_experts(generator, 16, 128, 128, MIXED)
    x, residual = bf16(generator.normal(0.0, 1.0, (1, 128))), bf16(generator.normal(0.0, 1.0, (1, 128)))
    ones = mx.ones((128,), dtype=mx.bfloat16)
    logits = mx.array(generator.normal(0.0, 1.0, (1, 17)).astype(np.float32))
    first, second = (
        experts_down(*experts_gate_up(x, ones, logits, weights, 4, EPS, True), weights, residual) for _ in range(2)
    )
    assert mx.array_equal(first, second).item()


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 8])
def test_a_routing_keeps_every_bit(top_k: int) -> None:
    experts = mx.arange(top_k, dtype=mx.uint32) + 250
    scores = mx.array(rng(top_k).standard_normal(top_k + 1).astype(np.float32))
    routing = join_routing(experts, scores)
    assert (routing.dtype, routing.shape) == (mx.uint32, (2 * top_k + 1,))
    got_experts, got_scores = split_routing(routing)
    assert mx.array_equal(got_experts, experts).item()
    assert mx.array_equal(got_scores, scores).item()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": mx.zeros((2, 64), mx.bfloat16)}, "x is .* expected .*bfloat16 \\(1, 64\\)"),
        ({"x": mx.zeros((1, 64))}, "x is .*float32"),
        ({"norm_weight": mx.ones((32,), mx.bfloat16)}, "norm_weight is"),
        ({"logits": mx.zeros((1, 8))}, "logits is .* expected .*\\(1, 9\\)"),
        ({"top_k": 9}, "top_k is 9 with 8 experts"),
    ],
    ids=["two-rows", "float32", "short-norm", "too-few-logits", "top-k"],
)
def test_gate_up_errors(change: dict[str, object], message: str) -> None:
    weights, _ = make_experts(rng(7), 8, 64, 64)
    arguments = {
        "x": mx.zeros((1, 64), mx.bfloat16),
        "norm_weight": mx.ones((64,), mx.bfloat16),
        "logits": mx.zeros((1, 9)),
        "weights": weights,
        "top_k": 2,
        "eps": EPS,
        "normalise": True,
    }
    with pytest.raises(ValueError, match=message):
        experts_gate_up(**(arguments | change))


@pytest.mark.parametrize(
    ("index", "array", "message"),
    [
        (0, mx.zeros((2, 64), mx.bfloat16), "hidden is .* expected .*\\(3, 64\\)"),
        (1, mx.zeros((5,), mx.int32), "routing is .*int32"),
        (1, mx.zeros((4,), mx.uint32), "routing is .* expected .*\\(5,\\)"),
        (1, mx.zeros((1,), mx.uint32), "routing holds 0 experts; expected 1 to 8"),
        (3, mx.zeros((1, 32), mx.bfloat16), "residual is"),
    ],
    ids=["hidden", "signed", "a word short", "no experts", "residual"],
)
def test_down_errors(index: int, array: mx.array, message: str) -> None:
    weights, _ = make_experts(rng(8), 8, 64, 64)
    arguments = [
        mx.zeros((3, 64), mx.bfloat16),
        mx.zeros((5,), mx.uint32),
        weights,
        mx.zeros((1, 64), mx.bfloat16),
    ]
    arguments[index] = array
    with pytest.raises(ValueError, match=message):
        experts_down(*arguments)
