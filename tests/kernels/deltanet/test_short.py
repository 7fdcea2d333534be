"""`short_chunk` and `batch_step`: from the projection to the gated norm in one launch."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import deltanet
from lily_mlx.kernels.deltanet import reference
from lily_mlx.kernels.deltanet.policy import Columns, scan_columns, short_columns, step_columns
from tests.support import BFLOAT16_TOLERANCE, assert_close, bf16, rng, to_numpy

from .layer import HEADS, Layer, arrays, float32, heads_id, random_layer, rows_id, same_bits

EPS = 1e-6
ROWS = [1, 2, 3, 15, 16, 17, 33, 64]
NAMES = ("out", "conv_state", "state")
# Our split beside those of the kernels that it must agree with, bit for bit.
SPLITS = {
    "cpu": (short_columns("cpu"), scan_columns("cpu"), step_columns("cpu")),
    "gpu": (short_columns("cuda"), scan_columns("cuda"), step_columns("cuda")),
    "4-columns": (Columns(lanes=8, columns=4, simdgroups=8), scan_columns("cuda"), step_columns("cuda")),
}
Outputs = tuple[mx.array, mx.array, mx.array]


def weight_of(seed: int) -> mx.array:
    return bf16(rng(seed).uniform(0.5, 1.5, 128))


def chunk(seed: int, heads: tuple[int, int], rows: int) -> tuple[Layer, mx.array]:
    return random_layer(seed, heads, rows, z_is_nan=False), weight_of(seed + 1)


def run(layer: Layer, weight: mx.array, split: Columns | None = None) -> Outputs:
    conv_state, *rest = layer.convolution
    return deltanet.short_chunk(layer.proj, conv_state, layer.state, *rest, weight, layer.shape, EPS, columns=split)


def three_launches(layer: Layer, weight: mx.array, split: Columns | None = None) -> Outputs:
    *prepared, conv_state = deltanet.prepare(layer.proj, *layer.convolution, layer.shape)
    y, state = deltanet.scan(*prepared, layer.state, layer.shape, columns=split)
    return deltanet.gated_norm(y, layer.proj, weight, layer.shape, EPS), conv_state, state


def assert_same(got: Outputs, want: Outputs) -> None:
    for name, ours, theirs in zip(NAMES, got, want, strict=True):
        assert same_bits(ours, theirs), f"{name} differs"


def check(layer: Layer, weight: mx.array, split: Columns | None = None) -> Outputs:
    """Compares with the reference, which does not round q, k, v and y."""
    got = run(layer, weight, split)
    conv_state, *rest = layer.convolution
    want = reference.short_chunk(*arrays(layer.proj, conv_state, layer.state, *rest, weight), layer.shape, EPS)
    assert [x.dtype for x in got] == [mx.bfloat16, mx.bfloat16, mx.float32]
    assert_close("out", got[0], want[0], BFLOAT16_TOLERANCE)
    assert np.array_equal(to_numpy(got[1]), want[1]), "conv_state must be copied as it is"
    assert_close("state", got[2], want[2], BFLOAT16_TOLERANCE / 2)
    return got


class TestChunk:
    @pytest.mark.parametrize("rows", ROWS, ids=rows_id)
    @pytest.mark.parametrize("split", SPLITS)
    def test_the_bits_of_three_launches(self, rows, split):
        ours, scan, _ = SPLITS[split]
        inputs = chunk(rows, (1, 2), rows)
        assert_same(check(*inputs, ours), three_launches(*inputs, scan))

    @pytest.mark.parametrize("heads", HEADS, ids=heads_id)
    @pytest.mark.parametrize("split", SPLITS)
    def test_heads(self, heads, split):
        ours, scan, _ = SPLITS[split]
        inputs = chunk(2, heads, 5)
        assert_same(check(*inputs, ours), three_launches(*inputs, scan))

    def test_full_size(self):
        """Every head of Qwen3.6-35B-A3B."""
        ours, scan, _ = SPLITS["gpu"]
        inputs = chunk(3, (16, 32), 2)
        assert_same(check(*inputs, ours), three_launches(*inputs, scan))

    @pytest.mark.parametrize("rows", [1, 3, 18], ids=rows_id)
    def test_default_split(self, rows):
        inputs = chunk(4, (2, 4), rows)
        assert_same(check(*inputs), three_launches(*inputs))

    @pytest.mark.parametrize("rows", [1, 2, 17], ids=rows_id)
    def test_first_tokens(self, rows):
        """Empty window and state: what a new sequence starts with."""
        layer, weight = chunk(5, (1, 2), rows)
        layer.conv_state, layer.state = mx.zeros_like(layer.conv_state), mx.zeros_like(layer.state)
        ours, scan, _ = SPLITS["gpu"]
        got = run(layer, weight, ours)
        assert_same(got, three_launches(layer, weight, scan))
        assert np.isfinite(to_numpy(got[0])).all()

    def test_float32_weight(self):
        layer, weight = chunk(6, (1, 2), 3)
        weight = float32(rng(7).normal(size=128))
        assert_same(check(layer, weight), three_launches(layer, weight))

    @pytest.mark.parametrize("sizes", [[1] * 5, [4, 1], [16, 17, 2], [20, 15]], ids=str)
    def test_chunks_give_the_same_bits(self, sizes):
        """Rows at once or in several chunks, of which some have more than one block."""
        layer, weight = chunk(8, (1, 2), sum(sizes))
        split = SPLITS["gpu"][0]
        want = run(layer, weight, split)
        proj, parts, start = layer.proj, [], 0
        for size in sizes:
            layer.proj = mx.contiguous(proj[start : start + size])
            out, layer.conv_state, layer.state = run(layer, weight, split)
            parts.append(out)
            start += size
        assert_same((mx.concatenate(parts), layer.conv_state, layer.state), want)

    def test_a_nan_stays_in_its_head(self):
        """A NaN in v of the first head, in the last row, and nowhere after it."""
        layer, weight = chunk(9, (1, 2), 18)
        proj = to_numpy(layer.proj)
        proj[17, 256:384] = np.nan
        layer.proj = bf16(proj)
        out, _, state = run(layer, weight)
        out, state = to_numpy(out), to_numpy(state)
        assert np.isnan(out[17, :128]).all()
        assert np.isnan(state[0]).all()
        assert np.isfinite(out[:17]).all()
        assert np.isfinite(out[17, 128:]).all()
        assert np.isfinite(state[1]).all()

    def test_extreme_gates_and_z(self):
        layer, weight = chunk(10, (1, 4), 9)
        shape, proj = layer.shape, to_numpy(layer.proj)
        extremes = np.array([-300, -60, -8, -1e-3, 0, 1e-3, 8, 60, 300])
        proj[:, shape.b_offset : shape.a_offset] = extremes[:, None]
        proj[:, shape.a_offset :] = extremes[::-1, None]
        proj[:, shape.z_offset : shape.b_offset] = np.roll(extremes, 3)[:, None]
        layer.proj, layer.a_log = bf16(proj), float32(np.array([-20, 0, 8, 30]))
        assert_same(check(layer, weight), three_launches(layer, weight))

    def test_inputs_stay_as_they_are(self):
        layer, weight = chunk(11, (1, 2), 2)
        before = arrays(layer.proj, layer.conv_state, layer.state)
        first, second = run(layer, weight), run(layer, weight)
        assert_same(first, second)
        for old, array in zip(before, (layer.proj, layer.conv_state, layer.state), strict=True):
            assert np.array_equal(to_numpy(array), old)


def batch_of(seed: int, heads: tuple[int, int], rows: int) -> tuple[Layer, mx.array, mx.array, mx.array]:
    """A layer with a row of the projection for each sequence, their windows and states, and the norm's weight."""
    (layer, weight), generator = chunk(seed, heads, rows), rng(seed + 1)
    shape = layer.shape
    windows = bf16(generator.normal(size=(rows, 3, shape.channels)))
    states = float32(generator.normal(size=(rows, shape.value_heads, shape.value_dim, shape.key_dim)))
    return layer, windows, states, weight


def run_batch(
    layer: Layer, windows: mx.array, states: mx.array, weight: mx.array, split: Columns | None = None
) -> Outputs:
    _, *rest = layer.convolution
    return deltanet.batch_step(layer.proj, windows, states, *rest, weight, layer.shape, EPS, columns=split)


class TestBatch:
    @pytest.mark.parametrize("heads", HEADS, ids=heads_id)
    @pytest.mark.parametrize("split", SPLITS)
    def test_heads(self, heads, split):
        layer, windows, states, weight = batch_of(1, heads, 3)
        got = run_batch(layer, windows, states, weight, SPLITS[split][0])
        _, *rest = layer.convolution
        want = reference.batch_step(*arrays(layer.proj, windows, states, *rest, weight), layer.shape, EPS)
        assert [x.dtype for x in got] == [mx.bfloat16, mx.bfloat16, mx.float32]
        assert_close("out", got[0], want[0], BFLOAT16_TOLERANCE)
        assert np.array_equal(to_numpy(got[1]), want[1])
        assert_close("state", got[2], want[2], BFLOAT16_TOLERANCE / 4)

    @pytest.mark.parametrize("rows", [1, 2, 5, 16])
    @pytest.mark.parametrize("split", SPLITS)
    def test_a_sequence_has_the_bits_that_it_has_alone(self, rows, split):
        """Those of `step` and `gated_norm`."""
        layer, windows, states, weight = batch_of(2, (1, 2), rows)
        ours, _, step = SPLITS[split]
        together = run_batch(layer, windows, states, weight, ours)
        _, *rest = layer.convolution
        for row in range(rows):
            proj = mx.contiguous(layer.proj[row : row + 1])
            y, window, state = deltanet.step(proj, windows[row], states[row], *rest, layer.shape, columns=step)
            out = deltanet.gated_norm(y, proj, weight, layer.shape, EPS)
            assert_same((together[0][row : row + 1], together[1][row], together[2][row]), (out, window, state))

    def test_a_fresh_sequence_beside_others(self):
        """Its window and state are empty; those of its neighbour are NaN and stay there."""
        layer, windows, states, weight = batch_of(3, (1, 2), 3)
        windows[1], states[1] = mx.zeros_like(windows[1]), mx.zeros_like(states[1])
        windows[2], states[2] = mx.full(windows[2].shape, np.nan), mx.full(states[2].shape, np.nan)
        out, next_windows, next_states = run_batch(layer, windows, states, weight)
        for row in (0, 1):
            assert np.isfinite(to_numpy(out[row])).all()
            assert np.isfinite(to_numpy(next_states[row])).all()
            assert np.isfinite(to_numpy(next_windows[row])).all()
        assert np.isnan(to_numpy(next_states[2])).all()
