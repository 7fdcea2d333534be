"""Growing a cache: equal to one long array, and older caches stay as they are."""

from __future__ import annotations

import numpy as np
import pytest

from lily_mlx.kernels import attention
from lily_mlx.kernels.attention import TAIL_ROWS, AttentionShape, capacity_for, reference
from tests.support import bf16, rng, to_numpy

from .layer import cache_of, position_of, projection, random_rows, rows_of, shape_of


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 300])
@pytest.mark.parametrize("length", [0, 1, 127, 128, 200, 255])
def test_append_equals_concatenation(length, tokens):
    generator, shape = rng(length * 1000 + tokens), shape_of((4, 2), head_dim=64, rotary_dim=16)
    keys, values, new_keys = (random_rows(generator, n, shape) for n in (length, length, tokens))
    proj = projection(generator, tokens, shape)
    cache = cache_of(keys, values, shape)
    before = rows_of(cache, length)
    grown = attention.append(cache, bf16(new_keys), proj, position_of(length), length, shape)
    got_keys, got_values = rows_of(grown, length + tokens)
    np.testing.assert_array_equal(got_keys, np.concatenate([keys, new_keys]))
    new_values = reference.split_projection(to_numpy(proj), shape)[3]
    np.testing.assert_array_equal(got_values, np.concatenate([values, new_values]))
    assert grown.capacity >= (length + tokens) // TAIL_ROWS * TAIL_ROWS
    for old, now in zip(before, rows_of(cache, length), strict=True):
        np.testing.assert_array_equal(old, now)


def test_a_chunk_inside_the_tail_shares_the_large_arrays():
    generator, shape = rng(5), shape_of((2, 1), head_dim=64, rotary_dim=16)
    cache = cache_of(random_rows(generator, 140, shape), random_rows(generator, 140, shape), shape)
    grown = attention.append(
        cache,
        bf16(random_rows(generator, 3, shape)),
        projection(generator, 3, shape),
        position_of(140),
        140,
        shape,
    )
    assert grown.keys is cache.keys
    assert grown.values is cache.values


@pytest.mark.parametrize("length", [128, 256, 384])
def test_merge_tail_moves_the_full_tail(length):
    generator, shape = rng(length), shape_of((2, 2), head_dim=64, rotary_dim=16)
    keys, values = (random_rows(generator, length, shape) for _ in range(2))
    first = length - TAIL_ROWS
    cache = cache_of(keys[:first], values[:first], shape)
    last = cache_of(keys[first:], values[first:], shape)
    full = attention.KVCache(cache.keys, cache.values, last.keys[:, :TAIL_ROWS], last.values[:, :TAIL_ROWS])
    merged = attention.merge_tail(full, length)
    got_keys, got_values = rows_of(merged, length)
    np.testing.assert_array_equal(got_keys, keys)
    np.testing.assert_array_equal(got_values, values)
    assert merged.capacity == capacity_for(length)


@pytest.mark.parametrize(
    ("length", "capacity"),
    [(0, 256), (256, 256), (257, 512), (8192, 8192), (8193, 16384), (16384, 16384), (131_072, 131_072)],
)
def test_capacity_comes_in_buckets(length, capacity):
    assert capacity_for(length) == capacity


def test_wrong_arguments_are_named():
    generator, shape = rng(6), shape_of((2, 1), head_dim=64, rotary_dim=16)
    cache = cache_of(random_rows(generator, 5, shape), random_rows(generator, 5, shape), shape)
    k, proj = bf16(random_rows(generator, 2, shape)), projection(generator, 2, shape)
    with pytest.raises(ValueError, match="length 100 is not a positive multiple of 128"):
        attention.merge_tail(cache, 100)
    with pytest.raises(ValueError, match="length 5000 does not fit a cache of capacity 256"):
        attention.append(cache, k, proj, position_of(5000), 5000, shape)
    with pytest.raises(ValueError, match=r"proj must be bfloat16 \[2, 384\], got bfloat16 \[1, 384\]"):
        attention.append(cache, k, proj[:1], position_of(5), 5, shape)
    with pytest.raises(ValueError, match=r"position must be int32 \[1\], got float32 \[1\]"):
        attention.append(cache, k, proj, position_of(5).astype(attention.cache.mx.float32), 5, shape)
    with pytest.raises(ValueError, match="cannot hold -1 tokens"):
        capacity_for(-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "query_heads 8 must be a positive multiple of kv_heads 3"),
        (
            {"query_heads": 32, "kv_heads": 1},
            "32 query heads for each KV head; the kernels support at most 16",
        ),
        ({"head_dim": 100}, "head_dim 100 must be a multiple of 32"),
        ({"rotary_dim": 63}, "rotary_dim 63 must be even"),
        ({"rope_theta": 0.5}, "rope_theta 0.5 must be greater than 1"),
    ],
)
def test_unsupported_layers_are_refused(changes, message):
    sizes = {"query_heads": 8, "kv_heads": 1, "head_dim": 256, "rotary_dim": 64, "rope_theta": 1e7}
    with pytest.raises(ValueError, match=message):
        AttentionShape(**{**sizes, **changes})
