"""`batch_step`: one token of several sequences, each with its own window and state."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import deltanet
from lily_mlx.kernels.deltanet import reference
from lily_mlx.kernels.deltanet.policy import Columns
from tests.support import BFLOAT16_TOLERANCE, assert_close, bf16, rng, to_numpy

from .layer import HEADS, Layer, arrays, float32, heads_id, random_layer, same_bits
from .test_step import SPLITS


def batch_of(seed: int, heads: tuple[int, int], rows: int) -> tuple[Layer, mx.array, mx.array]:
    """A layer with a row of the projection for each sequence, and their windows and states."""
    layer, generator = random_layer(seed, heads, rows), rng(seed + 1)
    shape = layer.shape
    windows = bf16(generator.normal(size=(rows, 3, shape.channels)))
    states = float32(generator.normal(size=(rows, shape.value_heads, shape.value_dim, shape.key_dim)))
    return layer, windows, states


def run(layer: Layer, windows: mx.array, states: mx.array, split: Columns | None):
    _, *rest = layer.convolution
    return deltanet.batch_step(layer.proj, windows, states, *rest, layer.shape, columns=split)


@pytest.mark.parametrize("heads", HEADS, ids=heads_id)
@pytest.mark.parametrize("split", ["cpu", "gpu"])
def test_heads(heads, split):
    layer, windows, states = batch_of(1, heads, 3)
    y, next_windows, next_states = run(layer, windows, states, SPLITS[split])
    _, *rest = layer.convolution
    want = reference.batch_step(*arrays(layer.proj, windows, states, *rest), layer.shape)
    assert (y.dtype, next_windows.dtype, next_states.dtype) == (mx.bfloat16, mx.bfloat16, mx.float32)
    assert_close("y", y, want[0], BFLOAT16_TOLERANCE / 2)
    assert np.array_equal(to_numpy(next_windows), want[1])
    assert_close("state", next_states, want[2], BFLOAT16_TOLERANCE / 4)


@pytest.mark.parametrize("rows", [2, 5, 16])
@pytest.mark.parametrize("split", ["cpu", "gpu"])
def test_a_sequence_has_the_bits_that_it_has_alone(rows, split):
    layer, windows, states = batch_of(2, (1, 2), rows)
    together = run(layer, windows, states, SPLITS[split])
    _, *rest = layer.convolution
    for row in range(rows):
        proj = mx.contiguous(layer.proj[row : row + 1])
        alone = deltanet.step(proj, windows[row], states[row], *rest, layer.shape, columns=SPLITS[split])
        assert same_bits(together[0][row : row + 1], alone[0])
        assert same_bits(together[1][row], alone[1])
        assert same_bits(together[2][row], alone[2])


def test_a_fresh_sequence_beside_others():
    """Its window and state are empty; those of its neighbour are NaN and stay there."""
    layer, windows, states = batch_of(3, (1, 2), 3)
    windows[1], states[1] = mx.zeros_like(windows[1]), mx.zeros_like(states[1])
    windows[2], states[2] = mx.full(windows[2].shape, np.nan), mx.full(states[2].shape, np.nan)
    y, next_windows, next_states = run(layer, windows, states, None)
    for row in (0, 1):
        assert np.isfinite(to_numpy(y[row])).all()
        assert np.isfinite(to_numpy(next_states[row])).all()
        assert np.isfinite(to_numpy(next_windows[row])).all()
    assert np.isnan(to_numpy(next_states[2])).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"proj": mx.zeros((3, 1032), mx.bfloat16)}, "batch_step: proj must be"),
        ({"conv_state": mx.zeros((3, 512), mx.bfloat16)}, "batch_step: conv_state must be"),
        ({"state": mx.zeros((1, 2, 128, 128))}, "batch_step: state must be"),
        ({"dt_bias": mx.zeros(3)}, "batch_step: dt_bias must be"),
    ],
    ids=["projection-width", "one-window", "one-state", "gates"],
)
def test_wrong_arguments_are_refused(change, message):
    layer, windows, states = batch_of(4, (1, 2), 2)
    _, *rest = layer.convolution
    names = ("conv_weight", "a_log", "dt_bias")
    good = {"proj": layer.proj, "conv_state": windows, "state": states, **dict(zip(names, rest, strict=True))}
    with pytest.raises(ValueError, match=message):
        deltanet.batch_step(**(good | change), shape=layer.shape)
