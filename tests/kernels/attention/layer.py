"""Random inputs of one attention layer, and caches whose unused rows are NaN."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from lily_mlx.kernels.attention import TAIL_ROWS, AttentionShape, KVCache, capacity_for, reference
from tests.support import bf16, round_bf16, to_numpy

EPS = 1e-6
# Query and KV heads: the tiny model, the full one, no sharing, a group that is no power of two, and groups that decode
# shares between two sets of simdgroups, evenly and not.
HEADS = {
    "8-to-1": (8, 1),
    "16-to-2": (16, 2),
    "2-to-2": (2, 2),
    "8-to-2": (8, 2),
    "3-to-1": (3, 1),
    "16-to-1": (16, 1),
    "11-to-1": (11, 1),
}


def shape_of(heads: tuple[int, int] = (8, 1), head_dim: int = 256, rotary_dim: int = 64) -> AttentionShape:
    return AttentionShape(*heads, head_dim=head_dim, rotary_dim=rotary_dim, rope_theta=1e7)


def position_of(value: int) -> mx.array:
    return mx.array([value], mx.int32)


def projection(generator: np.random.Generator, rows: int, shape: AttentionShape) -> mx.array:
    return bf16(generator.normal(size=(rows, shape.projection_width)))


def norms(generator: np.random.Generator, shape: AttentionShape) -> tuple[mx.array, mx.array]:
    return tuple(bf16(1 + 0.2 * generator.normal(size=shape.head_dim)) for _ in range(2))  # type: ignore[return-value]


def random_rows(generator: np.random.Generator, length: int, shape: AttentionShape) -> np.ndarray:
    """Keys or values [length, Hkv, D], already rounded to bfloat16."""
    return round_bf16(generator.normal(size=(length, shape.kv_heads, shape.head_dim)))


def cache_of(keys: np.ndarray, values: np.ndarray, shape: AttentionShape, capacity: int | None = None) -> KVCache:
    """A cache of given rows [n, Hkv, D]; rows that no sequence defines are NaN."""
    length = keys.shape[0]
    in_main = length - length % TAIL_ROWS
    capacity = capacity or capacity_for(in_main)

    def block(rows: np.ndarray, size: int) -> mx.array:
        filled = np.full((shape.kv_heads, size, shape.head_dim), np.nan)
        filled[:, : rows.shape[0]] = rows.transpose(1, 0, 2)
        return bf16(filled)

    return KVCache(
        block(keys[:in_main], capacity),
        block(values[:in_main], capacity),
        block(keys[in_main:], TAIL_ROWS),
        block(values[in_main:], TAIL_ROWS),
    )


def rows_of(cache: KVCache, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values [n, Hkv, D] that a cache of `length` tokens holds."""
    in_main = length - length % TAIL_ROWS

    def join(main: mx.array, tail: mx.array) -> np.ndarray:
        rows = mx.concatenate([main[:, :in_main], tail[:, : length - in_main]], axis=1)
        return np.array(rows.astype(mx.float32)).astype(np.float64).transpose(1, 0, 2)

    return join(cache.keys, cache.tail_keys), join(cache.values, cache.tail_values)


def attend(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, proj: mx.array, shape: AttentionShape
) -> np.ndarray:
    """The reference for keys and values [n, Hkv, D]."""
    gate = reference.split_projection(to_numpy(proj), shape)[1]
    return reference.attend(q, keys.transpose(1, 0, 2), values.transpose(1, 0, 2), position, gate, shape)
