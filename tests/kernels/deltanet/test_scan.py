"""`scan`: the delta rule over a chunk."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import deltanet
from lily_mlx.kernels.deltanet import reference
from lily_mlx.kernels.deltanet.policy import Columns, scan_columns
from tests.support import assert_close, bf16, rng

from .layer import HEADS, ROWS, arrays, assert_rounded_once, float32, heads_id, rows_id, same_bits, shape_of

STATE_TOLERANCE = 2e-6
SPLITS = {
    "cpu": scan_columns("cpu"),
    "gpu": scan_columns("cuda"),
    "4-lanes": Columns(lanes=4, columns=1, simdgroups=4, ahead=1),
    "16-lanes-2-columns": Columns(lanes=16, columns=2, simdgroups=2, ahead=3),
    "8-lanes-2-columns": Columns(lanes=8, columns=2, simdgroups=1, ahead=2),
}
GPU = SPLITS["gpu"]


def random_inputs(seed, heads, rows):
    """q, k, v, decay, beta and state as `prepare` would give them."""
    generator, shape = rng(seed), shape_of(heads)
    q, k = (generator.normal(size=(rows, shape.key_heads, 128)) for _ in range(2))
    q /= np.linalg.norm(q, axis=-1, keepdims=True) * 128**0.5
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = generator.normal(size=(rows, shape.value_heads, 128))
    decay = generator.uniform(0.8, 1.0, (rows, shape.value_heads))
    beta = generator.uniform(0.0, 1.0, (rows, shape.value_heads))
    state = generator.normal(size=(shape.value_heads, 128, 128))
    return shape, [bf16(q), bf16(k), bf16(v), float32(decay), float32(beta), float32(state)]


def check(shape, inputs, split) -> tuple[mx.array, mx.array]:
    y, state = deltanet.scan(*inputs, shape, columns=split)
    want_y, want_state = reference.scan(*arrays(*inputs), shape)
    assert (y.dtype, state.dtype) == (mx.bfloat16, mx.float32)
    assert_rounded_once("y", y, want_y, slack=2e-6)
    assert_close("state", state, want_state, STATE_TOLERANCE)
    return y, state


@pytest.mark.parametrize("rows", ROWS, ids=rows_id)
@pytest.mark.parametrize("split", ["cpu", "gpu"])
def test_rows(rows, split):
    check(*random_inputs(1, (1, 1), rows), SPLITS[split])


@pytest.mark.parametrize("heads", HEADS, ids=heads_id)
@pytest.mark.parametrize("split", ["cpu", "gpu"])
def test_heads(heads, split):
    check(*random_inputs(2, heads, 4), SPLITS[split])


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_splits(split):
    check(*random_inputs(3, (1, 2), 7), split)


def test_full_size():
    """Every head of Qwen3.6-35B-A3B."""
    check(*random_inputs(11, (16, 32), 2), GPU)


def test_default_split():
    check(*random_inputs(4, (1, 2), 3), None)


@pytest.mark.parametrize("chunks", [[1] * 11, [4, 7], [3, 1, 6, 1], [10, 1]], ids=str)
@pytest.mark.parametrize("split", ["cpu", "gpu"])
def test_chunks_give_the_same_bits(chunks, split):
    shape, (*rows, state) = random_inputs(5, (1, 2), 11)
    want_y, want_state = deltanet.scan(*rows, state, shape, columns=SPLITS[split])
    parts, start = [], 0
    for size in chunks:
        y, state = deltanet.scan(
            *(mx.contiguous(x[start : start + size]) for x in rows), state, shape, columns=SPLITS[split]
        )
        parts.append(y)
        start += size
    assert same_bits(mx.concatenate(parts), want_y)
    assert same_bits(state, want_state)


def test_gates_at_their_limits():
    """decay 0 forgets, decay 1 keeps; beta 0 writes nothing, beta 1 replaces the value of a key."""
    shape, inputs = random_inputs(6, (1, 4), 8)
    decay, beta = np.zeros((8, 4)), np.zeros((8, 4))
    decay[:, 1::2] = 1.0
    beta[:, 2:] = 1.0
    inputs[3], inputs[4] = float32(decay), float32(beta)
    y, state = check(shape, inputs, GPU)
    assert not np.array(state)[0].any()
    assert same_bits(state[1], inputs[5][1])
    assert not np.array(y.astype(mx.float32)).reshape(8, 4, 128)[:, 0].any()


def test_zero_keys_and_queries():
    shape, inputs = random_inputs(7, (1, 2), 5)
    zero = mx.zeros_like(inputs[0])
    y, state = check(shape, [zero, zero, *inputs[2:]], GPU)
    assert not np.array(y.astype(mx.float32)).any()
    assert not np.isnan(np.array(state)).any()


def test_repeated_key_stores_the_last_value():
    """With beta 1 and no decay the state answers a key of length 1 with the value stored last."""
    shape, inputs = random_inputs(8, (1, 1), 6)
    one_hot = np.zeros((6, 1, 128))
    one_hot[:, 0, 77] = 1.0
    ones = float32(np.ones((6, 1)))
    y, _ = check(shape, [bf16(one_hot), bf16(one_hot), inputs[2], ones, ones, inputs[5]], GPU)
    assert_rounded_once("y", y, arrays(inputs[2])[0].reshape(6, 128))


@pytest.mark.slow
def test_long_chunk_keeps_its_precision():
    shape, inputs = random_inputs(9, (1, 1), 1025)
    inputs[3] = float32(rng(10).uniform(0.995, 1.0, (1025, 1)))
    check(shape, inputs, None)
