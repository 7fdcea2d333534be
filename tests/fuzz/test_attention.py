"""Attention kernels on random heads, positions, cache lengths and parts, in checked mode, with poisoned caches."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from lily_mlx.kernels import attention
from lily_mlx.kernels.attention import TAIL_ROWS, capacity_for, policy, reference
from tests.kernels.attention.layer import (
    attend,
    cache_of,
    norms,
    position_of,
    projection,
    random_rows,
    rows_of,
    shape_of,
)
from tests.support import bf16, to_numpy

from .profile import assert_near, choice, fuzz, offsets, placed, seeds

pytestmark = pytest.mark.checked

EPS = 1e-6
OUT = 1e-2
heads = choice(((8, 1), (3, 1)), ((8, 1), (16, 2), (2, 2), (8, 2), (3, 1), (16, 1), (11, 1), (5, 5)))
# (head dimension, rotary dimensions)
dims = choice(((64, 32), (256, 64)), ((32, 0), (32, 32), (64, 16), (96, 64), (128, 128), (160, 34), (256, 64)))
positions = st.one_of(st.integers(0, 300), st.sampled_from((65_535, 131_072, 262_143)))
lengths = st.one_of(st.integers(0, 300), st.sampled_from((127, 128, 129, 255, 256, 257, 383)))
sharpness = st.sampled_from((1.0, 8.0))  # of the scores: flat, or one key far ahead


@fuzz(8, heads=heads, dims=dims, tokens=st.integers(1, 30), position=positions, offset=offsets(), seed=seeds())
def test_prepare(heads, dims, tokens, position, offset, seed):
    generator, shape = np.random.default_rng(seed), shape_of(heads, *dims)
    proj = projection(generator, tokens, shape)
    unread = to_numpy(proj)
    unread[:, shape.value_offset :] = np.nan
    proj, gains = placed(bf16(unread), offset), norms(generator, shape)
    got = attention.prepare(proj, *gains, position_of(position), shape, EPS)
    want = reference.prepare(to_numpy(proj), *map(to_numpy, gains), np.array([position]), shape, EPS)
    for name, ours, theirs in zip("qk", got, want, strict=True):
        assert_near(name, ours, theirs, 5e-3)


@fuzz(10, heads=heads, dims=dims, length=lengths, sharp=sharpness, seed=seeds())
def test_step(heads, dims, length, sharp, seed):
    """One token: its row goes into the tail, older rows stay, and nothing beyond the sequence is read."""
    generator, shape = np.random.default_rng(seed), shape_of(heads, *dims)
    keys, values = random_rows(generator, length, shape), random_rows(generator, length, shape)
    cache = cache_of(keys, values, shape)
    proj, position = projection(generator, 1, shape), position_of(length)
    q_norm, k_norm = norms(generator, shape)
    gains = (sharp * q_norm).astype(mx.bfloat16), k_norm
    got, after = attention.step(proj, *gains, position, cache, shape, EPS)
    _, want_k = reference.prepare(to_numpy(proj), *map(to_numpy, gains), np.array([length]), shape, EPS)
    row, old = length % TAIL_ROWS, length - length % TAIL_ROWS
    assert_near("k", after.tail_keys[:, row], want_k[0], 5e-3)
    new_values = reference.split_projection(to_numpy(proj), shape)[3][0]
    assert np.array_equal(to_numpy(after.tail_values[:, row]), new_values)
    assert np.array_equal(to_numpy(after.tail_keys[:, :row]), keys[old:].transpose(1, 0, 2))
    assert np.array_equal(to_numpy(after.tail_values[:, :row]), values[old:].transpose(1, 0, 2))

    q, _ = attention.prepare(proj, *gains, position, shape, EPS)  # rounded, which sharp scores would magnify
    all_keys, all_values = rows_of(after, length + 1) if (length + 1) % TAIL_ROWS else _full_tail(after, length)
    assert_near("out", got, attend(to_numpy(q), all_keys, all_values, length, proj, shape), OUT)


def _full_tail(cache: attention.KVCache, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a cache whose tail has just been filled and not been merged."""
    merged = attention.merge_tail(cache, length + 1)
    return rows_of(merged, length + 1)


@fuzz(
    8,
    heads=heads,
    head_dim=choice((64,), (32, 64, 96, 256)),
    length=lengths,
    tokens=st.one_of(st.integers(1, 40), st.integers(100, 300)),
    offset=offsets(),
    seed=seeds(),
)
def test_append_and_merge(heads, head_dim, length, tokens, offset, seed):
    """Rows are moved bit for bit, whatever the lengths."""
    generator, shape = np.random.default_rng(seed), shape_of(heads, head_dim, 0)
    keys, values = random_rows(generator, length, shape), random_rows(generator, length, shape)
    proj = placed(projection(generator, tokens, shape), offset)
    k = placed(bf16(random_rows(generator, tokens, shape)), offset)
    cache = attention.append(cache_of(keys, values, shape), k, proj, position_of(length), length, shape)
    total = length + tokens
    got_keys, got_values = rows_of(cache, total)
    new_values = reference.split_projection(to_numpy(proj), shape)[3]
    assert np.array_equal(got_keys, np.concatenate([keys, to_numpy(k)]))
    assert np.array_equal(got_values, np.concatenate([values, new_values]))
    assert cache.capacity >= capacity_for(total - total % TAIL_ROWS)


@fuzz(6, heads=heads, head_dim=choice((64,), (32, 64, 96, 256)), blocks=st.integers(1, 3), seed=seeds())
def test_merge_tail(heads, head_dim, blocks, seed):
    generator, shape = np.random.default_rng(seed), shape_of(heads, head_dim, 0)
    length = TAIL_ROWS * blocks
    keys, values = random_rows(generator, length, shape), random_rows(generator, length, shape)
    before = cache_of(keys[: length - 1], values[: length - 1], shape)
    tails = (bf16(rows[length - TAIL_ROWS :].transpose(1, 0, 2)) for rows in (keys, values))
    merged = attention.merge_tail(attention.KVCache(before.keys, before.values, *tails), length)
    got_keys, got_values = rows_of(merged, length)
    assert np.array_equal(got_keys, keys)
    assert np.array_equal(got_values, values)


# None: by the policy; otherwise so many keys in a part.
_PARTS = (None, 128)
_ALL_PARTS = (None, 32, 64, 128, 256)


@fuzz(
    8,
    heads=heads,
    head_dim=choice((64,), (32, 64, 96, 128, 256)),
    length=lengths,
    tokens=st.integers(1, 40),
    part_keys=choice(_PARTS, _ALL_PARTS),
    sharp=sharpness,
    offset=offsets(),
    seed=seeds(),
)
def test_prefill_attention(heads, head_dim, length, tokens, part_keys, sharp, offset, seed):
    generator, shape = np.random.default_rng(seed), shape_of(heads, head_dim, 0)
    total = length + tokens
    keys, values = random_rows(generator, total, shape), random_rows(generator, total, shape)
    cache = cache_of(keys, values, shape)
    proj = placed(projection(generator, tokens, shape), offset)
    q = placed(bf16(sharp * generator.standard_normal((tokens, shape.query_heads, head_dim))), offset)
    plan = None
    if part_keys is not None:
        plan = replace(policy.prefill_plan(tokens * shape.group, shape.kv_heads, 0, False), part_keys=part_keys)
    got = attention.prefill_attention(q, cache, position_of(length), proj, shape, plan)
    assert_near("out", got, attend(to_numpy(q), keys, values, length, proj, shape), OUT)
