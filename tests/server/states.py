"""States of a made-up model with two attention layers, small enough for tests of the prefix cache alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from lily_mlx.engine import SequenceState
from lily_mlx.kernels.attention import TAIL_ROWS, KVCache, capacity_for
from lily_mlx.model import DeltaNetCache

HEADS, WIDTH = 2, 32
BLOCK_BYTES = 2 * 2 * HEADS * TAIL_ROWS * WIDTH * 2
STATE_BYTES = 3 * 8 * 2 + 4 * 16 * 16 * 4 + BLOCK_BYTES  # the tails are as large as a block


def made_state(tokens) -> SequenceState:
    """A state whose values follow from the tokens: keys and values of a row from the tokens up to it."""
    tokens = np.asarray(tokens, np.int64)
    sums = np.cumsum(tokens * 31 % 101).astype(np.float32) % 251

    def kv(factor):
        rows = np.broadcast_to((sums * factor % 127)[None, :, None], (HEADS, len(tokens), WIDTH))
        main = len(tokens) // TAIL_ROWS * TAIL_ROWS
        return (
            padded(rows[:, :main], capacity_for(main)),
            padded(rows[:, main:], TAIL_ROWS),
        )

    def padded(rows, size):
        full = np.full((HEADS, size, WIDTH), np.nan, np.float32)
        full[:, : rows.shape[1]] = rows
        return mx.array(full).astype(mx.bfloat16)

    total = float(sums[-1]) if len(tokens) else 0.0
    layers = []
    for layer in (1, 2):
        (keys, tail_keys), (values, tail_values) = kv(layer), kv(layer + 10)
        layers.append(KVCache(keys, values, tail_keys, tail_values))
    layers.insert(1, DeltaNetCache(mx.full((3, 8), total, mx.bfloat16), mx.full((4, 16, 16), total / 3, mx.float32)))
    return SequenceState(len(tokens), tuple(layers), None, mx.array([len(tokens)], mx.int32), None)


def same(first: SequenceState, second: SequenceState) -> bool:
    """Whether two states hold the same, where it counts."""
    assert first.length == second.length
    assert first.position.item() == second.position.item()
    main, tail = first.length // TAIL_ROWS * TAIL_ROWS, first.length % TAIL_ROWS
    equal = []
    for one, other in zip(first.caches, second.caches, strict=True):
        if isinstance(one, DeltaNetCache):
            equal += [mx.array_equal(one.conv, other.conv), mx.array_equal(one.state, other.state)]
            continue
        assert one.keys.shape == other.keys.shape
        for name, rows in (("keys", main), ("values", main), ("tail_keys", tail), ("tail_values", tail)):
            equal.append(mx.array_equal(getattr(one, name)[:, :rows], getattr(other, name)[:, :rows]))
    return all(bool(item) for item in equal)
