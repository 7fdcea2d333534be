"""`step`: one token in one launch, and its agreement with the prefill kernels."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import deltanet
from lily_mlx.kernels.deltanet import reference
from lily_mlx.kernels.deltanet.policy import Columns, step_columns
from tests.support import BFLOAT16_TOLERANCE, assert_close, bf16, to_numpy

from .layer import HEADS, Layer, arrays, assert_rounded_once, float32, heads_id, random_layer, same_bits

STATE_TOLERANCE = 2e-6
SPLITS = {
    "cpu": step_columns("cpu"),
    "gpu": step_columns("cuda"),
    "32-lanes-4-columns": Columns(lanes=32, columns=4, simdgroups=8),
    "16-lanes-2-columns": Columns(lanes=16, columns=2, simdgroups=4),
}


def run(layer: Layer, split: Columns | None, row: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    conv_state, *rest = layer.convolution
    proj = mx.contiguous(layer.proj[row : row + 1])
    return deltanet.step(proj, conv_state, layer.state, *rest, layer.shape, columns=split)


def check(
    layer: Layer, split: Columns | None, y_tolerance: float = BFLOAT16_TOLERANCE / 2
) -> tuple[mx.array, mx.array, mx.array]:
    """Compares with the unrounded reference, and tightly with the delta rule of the rounded q, k and v."""
    y, conv_state, state = run(layer, split)
    conv, *rest = layer.convolution
    want = reference.step(*arrays(layer.proj, conv, layer.state, *rest), layer.shape)
    assert (y.dtype, conv_state.dtype, state.dtype) == (mx.bfloat16, mx.bfloat16, mx.float32)
    assert_close("y", y, want[0], y_tolerance)
    assert np.array_equal(to_numpy(conv_state), want[1])
    assert_close("state", state, want[2], BFLOAT16_TOLERANCE / 4)

    prepared = deltanet.prepare(layer.proj, *layer.convolution, layer.shape)
    exact_y, exact_state = reference.scan(*arrays(*prepared[:5], layer.state), layer.shape)
    assert_close("state after rounded q, k, v", state, exact_state, STATE_TOLERANCE)
    assert_rounded_once("y after rounded q, k, v", y, exact_y, slack=2e-6)
    assert same_bits(conv_state, prepared[5])
    return y, conv_state, state


@pytest.mark.parametrize("heads", HEADS, ids=heads_id)
@pytest.mark.parametrize("split", ["cpu", "gpu"])
def test_heads(heads, split):
    check(random_layer(1, heads, 1), SPLITS[split])


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_splits(split):
    check(random_layer(2, (1, 2), 1), split)


def test_full_size():
    """Every head of Qwen3.6-35B-A3B."""
    check(random_layer(9, (16, 32), 1), SPLITS["gpu"])


def test_default_split():
    check(random_layer(3, (1, 2), 1), None)


@pytest.mark.parametrize("split", ["cpu", "gpu"])
def test_steps_equal_a_chunk(split):
    layer = random_layer(4, (1, 2), 9)
    *prepared, want_conv = deltanet.prepare(layer.proj, *layer.convolution, layer.shape)
    want_y, want_state = deltanet.scan(*prepared, layer.state, layer.shape)
    parts = []
    for row in range(9):
        y, layer.conv_state, layer.state = run(layer, SPLITS[split], row)
        parts.append(y)
    assert same_bits(layer.conv_state, want_conv)
    assert_close("state", layer.state, to_numpy(want_state), STATE_TOLERANCE)
    # Sums in another order may fall on the other side of a rounding: one bfloat16 step.
    difference = np.abs(to_numpy(mx.concatenate(parts)) - to_numpy(want_y))
    assert np.all(difference <= 2.0**-7 * np.abs(to_numpy(want_y)) + 2e-6 * np.abs(to_numpy(want_y)).max())


@pytest.mark.parametrize(("a", "b"), [(-300, 300), (300, -300), (60, 60), (-60, -60), (0, 0)])
def test_extreme_gates(a, b):
    layer = random_layer(5, (1, 4), 1)
    proj = to_numpy(layer.proj)
    proj[:, layer.shape.b_offset : layer.shape.a_offset] = b
    proj[:, layer.shape.a_offset :] = a
    layer.proj, layer.a_log = bf16(proj), float32(np.array([-20, 0, 8, 30]))
    check(layer, SPLITS["gpu"])


def test_zero_queries_and_keys():
    layer = random_layer(6, (1, 2), 1)
    proj, conv_state = to_numpy(layer.proj), to_numpy(layer.conv_state)
    proj[:, :256] = 0
    conv_state[:, :256] = 0
    layer.proj, layer.conv_state = bf16(proj), bf16(conv_state)
    y, _, _ = check(layer, SPLITS["gpu"])
    assert not to_numpy(y).any()


def test_first_token():
    """Empty window and state: what a new sequence starts with."""
    layer = random_layer(7, (1, 2), 1)
    layer.conv_state, layer.state = mx.zeros_like(layer.conv_state), mx.zeros_like(layer.state)
    # Here y = beta v (k q), and the sum k q of random signs cancels, which enlarges the rounding of q and k.
    check(layer, SPLITS["gpu"], y_tolerance=2 * BFLOAT16_TOLERANCE)


def test_inputs_stay_as_they_are():
    layer = random_layer(8, (1, 2), 1)
    before = [to_numpy(x).copy() for x in (layer.conv_state, layer.state)]
    first = run(layer, None)
    second = run(layer, None)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    assert np.array_equal(to_numpy(layer.conv_state), before[0])
    assert np.array_equal(to_numpy(layer.state), before[1])
