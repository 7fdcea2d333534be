"""`prepare`: convolution, normalisation and gates of a chunk."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import deltanet
from lily_mlx.kernels.deltanet import reference
from tests.support import assert_close, bf16, to_numpy

from .layer import (
    HEADS,
    ROWS,
    Layer,
    arrays,
    assert_rounded_once,
    float32,
    heads_id,
    random_layer,
    rows_id,
    same_bits,
)

NAMES = ("q", "k", "v", "decay", "beta", "conv_state")


def check(layer: Layer, tile_rows: int | None = None) -> dict[str, mx.array]:
    """Compares every output with the reference; returns the outputs by name."""
    got = deltanet.prepare(layer.proj, *layer.convolution, layer.shape, tile_rows=tile_rows)
    want = reference.prepare(*arrays(layer.proj, *layer.convolution), layer.shape)
    for name, ours, theirs in zip(NAMES, got, want, strict=True):
        if name in ("decay", "beta"):
            assert ours.dtype == mx.float32
            assert_close(name, ours, theirs, 1e-6)
        else:
            assert ours.dtype == mx.bfloat16
            assert_rounded_once(name, ours, theirs)
    return dict(zip(NAMES, got, strict=True))


@pytest.mark.parametrize("rows", ROWS, ids=rows_id)
def test_rows(rows):
    check(random_layer(1, (1, 2), rows))


@pytest.mark.parametrize("heads", HEADS, ids=heads_id)
def test_heads(heads):
    check(random_layer(2, heads, 5))


def test_full_size():
    """Every head of Qwen3.6-35B-A3B."""
    check(random_layer(11, (16, 32), 3))


def test_more_heads_than_one_simdgroup_of_gates():
    check(random_layer(3, (1, 33), 2))


@pytest.mark.parametrize("tile_rows", [1, 2, 3, 16])
def test_tile_does_not_change_the_result(tile_rows):
    layer = random_layer(4, (1, 2), 18)
    expected = check(layer)
    got = check(layer, tile_rows)
    assert all(same_bits(got[name], expected[name]) for name in NAMES)


@pytest.mark.parametrize("rows", [64, 65], ids=rows_id)
def test_both_sides_of_the_tile_choice(rows):
    check(random_layer(5, (1, 1), rows))


@pytest.mark.parametrize("rows", [1, 2, 3, 4], ids=rows_id)
def test_conv_state_is_the_last_inputs(rows):
    layer = random_layer(6, (1, 2), rows)
    *_, conv_state = deltanet.prepare(layer.proj, *layer.convolution, layer.shape)
    joined = mx.concatenate([layer.conv_state, layer.proj[:, : layer.shape.channels]])
    assert same_bits(conv_state, joined[-3:])


def test_extreme_gates():
    layer = random_layer(7, (1, 4), 9)
    shape = layer.shape
    proj = to_numpy(layer.proj)
    extremes = [-300, -60, -8, -1e-3, 0, 1e-3, 8, 60, 300]
    proj[:, shape.b_offset : shape.a_offset] = np.array(extremes)[:, None]
    proj[:, shape.a_offset :] = np.array(extremes)[::-1, None]
    layer.proj = bf16(proj)
    layer.a_log = float32(np.array([-20, 0, 8, 30]))
    layer.dt_bias = float32(np.array([0, -5, 0, 5]))
    outputs = check(layer)
    decay, beta = to_numpy(outputs["decay"]), to_numpy(outputs["beta"])
    assert decay.min() == 0.0
    assert decay.max() == 1.0
    assert beta.min() >= 0.0
    assert beta.max() == 1.0


def test_slow_decay_keeps_its_precision():
    """1 - decay down to 1e-6, where a careless log(1 + exp(x)) would lose all digits."""
    layer = random_layer(8, (1, 4), 6)
    proj = to_numpy(layer.proj)
    proj[:, layer.shape.a_offset :] = np.array([-6, -8, -10, -12, -14, -18])[:, None]
    layer.proj, layer.dt_bias = bf16(proj), float32(np.zeros(4))
    layer.a_log = float32(np.array([0, 1, 2, 5]))
    *_, decay, _, _ = deltanet.prepare(layer.proj, *layer.convolution, layer.shape)
    *_, want, _, _ = reference.prepare(*arrays(layer.proj, *layer.convolution), layer.shape)
    # 6e-8 is half a unit in the last place of a decay just below 1.
    assert np.max(np.abs(to_numpy(decay) - want)) < 2 * 6e-8


def test_zero_rows_of_q_and_k():
    layer = random_layer(9, (1, 2), 6)
    proj, conv_state = to_numpy(layer.proj), to_numpy(layer.conv_state)
    proj[:4, :256] = 0
    conv_state[:, :256] = 0
    layer.proj, layer.conv_state = bf16(proj), bf16(conv_state)
    outputs = check(layer)
    assert not to_numpy(outputs["q"])[:4].any()
    assert not to_numpy(outputs["k"])[:4].any()


@pytest.mark.parametrize("size", [1e-8, 1e-3, 1e4], ids=lambda size: f"inputs-of-{size:g}")
def test_scale_of_the_inputs(size):
    """The normalisation sees sums of squares from far below its epsilon to far above."""
    layer = random_layer(10, (1, 1), 4)
    proj = to_numpy(layer.proj)
    proj[:, : layer.shape.channels] *= size
    layer.proj, layer.conv_state = bf16(proj), bf16(to_numpy(layer.conv_state) * size)
    check(layer)
