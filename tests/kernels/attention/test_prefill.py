"""Prefill: chunks of any length at any offset, equal to decode and to one long chunk."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import attention
from lily_mlx.kernels.attention import reference
from lily_mlx.kernels.attention.policy import PrefillPlan, prefill_plan
from tests.support import assert_close, bf16, rng, round_bf16, to_numpy

from .layer import EPS, HEADS, attend, cache_of, norms, position_of, projection, random_rows, shape_of


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_prepare_matches_the_reference(heads, tokens):
    generator, shape = rng(tokens), shape_of(heads)
    proj, (q_norm, k_norm) = projection(generator, tokens, shape), norms(generator, shape)
    q, k = attention.prepare(proj, q_norm, k_norm, position_of(77), shape, EPS)
    want_q, want_k = reference.prepare(to_numpy(proj), to_numpy(q_norm), to_numpy(k_norm), np.array([77]), shape, EPS)
    assert_close("q", q, want_q, 4e-3)
    assert_close("k", k, want_k, 4e-3)


@pytest.mark.parametrize("offset", [0, 5, 127, 128, 300])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 37])
def test_attention_matches_the_reference(offset, tokens):
    check_chunk(shape_of(), offset, tokens, seed=1000 * offset + tokens)


@pytest.mark.parametrize("heads", list(HEADS.values())[1:], ids=list(HEADS.keys())[1:])
@pytest.mark.parametrize(("offset", "tokens"), [(0, 7), (120, 12)])
def test_attention_with_other_groups(heads, offset, tokens):
    check_chunk(shape_of(heads), offset, tokens, seed=offset + tokens)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_attention_with_other_head_sizes(head_dim):
    check_chunk(shape_of((4, 2), head_dim=head_dim, rotary_dim=16), 30, 21, seed=head_dim)


def test_large_scores_do_not_overflow():
    check_chunk(shape_of(), 100, 9, seed=3, key_scale=128.0)


PLANS = [
    PrefillPlan(simdgroup_rows=16, simdgroups=4),
    PrefillPlan(simdgroup_rows=8, simdgroups=8),
    PrefillPlan(simdgroup_rows=8, simdgroups=4, keys=16),
    PrefillPlan(simdgroup_rows=16, simdgroups=4, part_keys=128),
    PrefillPlan(simdgroup_rows=8, simdgroups=8, part_keys=256),
]


@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda p: f"{p.simdgroups}x{p.simdgroup_rows}-rows-{p.keys}-keys-parts-of-{p.part_keys}"
)
@pytest.mark.parametrize(("offset", "tokens"), [(0, 9), (250, 19), (383, 1)])
def test_every_plan_gives_the_same_result(plan, offset, tokens):
    check_chunk(shape_of(), offset, tokens, seed=offset + tokens, plan=plan)


@pytest.mark.parametrize(("tokens", "parts"), [(3, 3), (8 * 65, 1)], ids=["few-rows-in-parts", "many-rows-whole"])
def test_few_rows_share_a_long_cache(tokens, parts):
    plan = prefill_plan(8 * tokens, kv_heads=2, capacity=1024, wide=True)
    assert plan.parts(1024) == parts
    if tokens < 10:
        check_chunk(shape_of(), 1000, tokens, seed=tokens)


@pytest.mark.parametrize("capacity", [256, 1024, 8192, 24576, 262144])
@pytest.mark.parametrize("tokens", [1, 17, 128, 2048])
def test_the_parts_cover_every_key(capacity, tokens):
    for wide in (False, True):
        plan = prefill_plan(8 * tokens, kv_heads=2, capacity=capacity, wide=wide)
        assert plan.blocks(8 * tokens) * plan.rows >= 8 * tokens
        if plan.part_keys is not None:
            assert plan.part_keys % plan.keys == 0
            assert plan.parts(capacity) * plan.part_keys >= capacity + attention.TAIL_ROWS


def check_chunk(shape, offset, tokens, seed, key_scale=1.0, plan=None):
    generator = rng(seed)
    proj = projection(generator, tokens, shape)
    keys, values = (random_rows(generator, offset + tokens, shape) for _ in range(2))
    keys = round_bf16(keys * key_scale)
    q = random_rows(generator, tokens, replace(shape, kv_heads=shape.query_heads))
    out = attention.prefill_attention(bf16(q), cache_of(keys, values, shape), position_of(offset), proj, shape, plan)
    want = attend(q, keys, values, offset, proj, shape)
    assert_close("attention", out, want, 1e-2)


@pytest.mark.parametrize("offset", [110, 240])
@pytest.mark.parametrize("split", [(40,), (1, 39), (7, 7, 26), (39, 1)], ids=str)
def test_chunks_equal_one_chunk_and_single_steps(split, offset):
    generator, shape = rng(9), shape_of((8, 1))
    proj, (q_norm, k_norm) = projection(generator, 40, shape), norms(generator, shape)
    start = cache_of(random_rows(generator, offset, shape), random_rows(generator, offset, shape), shape)

    cache, length, parts = start, offset, []
    for rows in split:
        chunk = proj[length - offset : length - offset + rows]
        position = position_of(length)
        q, k = attention.prepare(chunk, q_norm, k_norm, position, shape, EPS)
        cache = attention.append(cache, k, chunk, position, length, shape)
        parts.append(attention.prefill_attention(q, cache, position, chunk, shape))
        length += rows
    by_chunks = mx.concatenate(parts)

    cache, steps = start, []
    for i in range(40):
        position = position_of(offset + i)
        y, cache = attention.step(proj[i : i + 1], q_norm, k_norm, position, cache, shape, EPS)
        steps.append(y)
        if (offset + i + 1) % attention.TAIL_ROWS == 0:
            cache = attention.merge_tail(cache, offset + i + 1)
    assert_close("chunks against steps", by_chunks, to_numpy(mx.concatenate(steps)), 1e-2)
    assert np.isfinite(to_numpy(by_chunks)).all()


def test_a_snapshot_stays_as_it_is():
    """Two continuations of one cache, and the cache itself, do not see each other."""
    generator, shape, length = rng(12), shape_of((4, 2), head_dim=64, rotary_dim=16), 120
    q_norm, k_norm = norms(generator, shape)
    snapshot = cache_of(random_rows(generator, length, shape), random_rows(generator, length, shape), shape)
    step, position = projection(generator, 1, shape), position_of(length)

    def answer():
        return to_numpy(attention.step(step, q_norm, k_norm, position, snapshot, shape, EPS)[0])

    def continuation(chunk):
        q, k = attention.prepare(chunk, q_norm, k_norm, position, shape, EPS)
        cache = attention.append(snapshot, k, chunk, position, length, shape)
        return to_numpy(attention.prefill_attention(q, cache, position, chunk, shape))

    chunks = [projection(generator, rows, shape) for rows in (3, 20)]
    before, first = answer(), continuation(chunks[0])
    continuation(chunks[1])
    np.testing.assert_array_equal(answer(), before)
    np.testing.assert_array_equal(continuation(chunks[0]), first)
