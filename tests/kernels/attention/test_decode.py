"""Decode: one token against the cache, around every border of blocks, parts and capacities."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import attention
from lily_mlx.kernels.attention import reference
from lily_mlx.kernels.attention.policy import PartsPlan, part_rows, parts_plan
from lily_mlx.kernels.attention.rope import turns_per_position
from tests.support import assert_close, rng, round_bf16, to_numpy

from .layer import (
    EPS,
    HEADS,
    attend,
    cache_of,
    norms,
    position_of,
    projection,
    random_rows,
    rows_of,
    shape_of,
)

# Tokens before the new one: the tail's border, the smallest capacity's border, borders of parts.
LENGTHS = [0, 1, 63, 64, 126, 127, 128, 129, 191, 255, 256, 300]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("length", [0, 1, 127, 128, 300])
def test_step_prepare_matches_the_reference(heads, length):
    generator, shape = rng(1000 + length), shape_of(heads)
    proj, (q_norm, k_norm) = projection(generator, 1, shape), norms(generator, shape)
    keys, values = (random_rows(generator, length, shape) for _ in range(2))
    cache = cache_of(keys, values, shape)
    q, tail_keys, tail_values = attention.step_prepare(proj, q_norm, k_norm, position_of(length), cache, shape, EPS)
    want_q, want_k = reference.prepare(
        to_numpy(proj), to_numpy(q_norm), to_numpy(k_norm), np.array([length]), shape, EPS
    )
    assert_close("q", q, want_q[0], 4e-3)
    after = replace(cache, tail_keys=tail_keys, tail_values=tail_values)
    if (length + 1) % attention.TAIL_ROWS == 0:
        after = attention.merge_tail(after, length + 1)
    got_keys, got_values = rows_of(after, length + 1)
    np.testing.assert_array_equal(got_keys[:length], keys)
    np.testing.assert_array_equal(got_values[:length], values)
    assert_close("k", got_keys[length], want_k[0], 4e-3)
    np.testing.assert_array_equal(got_values[length], reference.split_projection(to_numpy(proj), shape)[3][0])


@pytest.mark.parametrize("length", LENGTHS)
def test_step_attention_matches_the_reference(length):
    check_step(length, shape_of(), seed=2000 + length)


@pytest.mark.parametrize("heads", list(HEADS.values())[1:], ids=list(HEADS)[1:])
@pytest.mark.parametrize("length", [0, 127, 128, 301])
def test_step_attention_with_other_groups(heads, length):
    check_step(length, shape_of(heads), seed=2000 + length)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_step_attention_with_other_head_sizes(head_dim):
    check_step(200, shape_of((4, 2), head_dim=head_dim, rotary_dim=16), seed=head_dim)


@pytest.mark.parametrize("capacity", [256, 512, 4096, 8192])
def test_unused_capacity_is_not_read(capacity):
    check_step(200, shape_of(), seed=capacity, capacity=capacity)


@pytest.mark.parametrize(
    "plan",
    [
        PartsPlan(part_rows=64, heads=8, head_sets=1, streams=8),
        PartsPlan(part_rows=128, heads=8, head_sets=1, streams=4),
        PartsPlan(part_rows=256, heads=4, head_sets=2, streams=4),
        PartsPlan(part_rows=512, heads=8, head_sets=1, streams=8),
    ],
    ids=lambda plan: f"parts-of-{plan.part_rows}-{plan.head_sets}-sets-{plan.streams}-streams",
)
@pytest.mark.parametrize("length", [130, 513])
def test_every_plan_gives_the_same_result(plan, length):
    check_step(length, shape_of(), seed=3000 + length, plan=plan)


def test_large_scores_do_not_overflow():
    check_step(200, shape_of(), seed=7, key_scale=128.0, relative=2e-2)


def check_step(length, shape, seed, capacity=None, plan=None, key_scale=1.0, relative=1e-2):
    generator = rng(seed)
    proj = projection(generator, 1, shape)
    keys, values = (random_rows(generator, length + 1, shape) for _ in range(2))
    keys = round_bf16(keys * key_scale)
    q = random_rows(generator, 1, replace(shape, kv_heads=shape.query_heads))[0]
    tail_begin = length - length % attention.TAIL_ROWS
    # The cache of `length` tokens with the new row already in its tail.
    padded = cache_of(keys[:tail_begin], values[:tail_begin], shape, capacity)
    tail = cache_of(keys[tail_begin:], values[tail_begin:], shape)
    if length + 1 - tail_begin == attention.TAIL_ROWS:  # a full tail stands in the cache's first block there
        tail = replace(tail, tail_keys=tail.keys[:, :128], tail_values=tail.values[:, :128])
    cache = replace(padded, tail_keys=tail.tail_keys, tail_values=tail.tail_values)
    out = attention.decode.step_attention(
        mx.array(q.astype(np.float32)).astype(mx.bfloat16), cache, position_of(length), proj, shape, plan
    )
    want = attend(q[None], keys, values, length, proj, shape)
    assert_close("attention", out, want, relative)


@pytest.mark.parametrize("capacity", [256, 4096, 8192, 16384, 24576, 65536, 73728, 262144])
def test_the_plan_covers_every_row(capacity):
    for group in (1, 3, 8, 16):
        plan = parts_plan(capacity, group)
        assert plan.main_parts(capacity) * plan.part_rows >= capacity
        assert plan.tail_parts * plan.part_rows >= attention.TAIL_ROWS
        assert plan.heads * plan.head_sets >= group
        assert plan.threads <= 512
        assert plan.part_rows == part_rows(capacity)


@pytest.mark.parametrize("position", [0, 1, 1000, 131_072, 262_143])
def test_rotary_angles_are_exact_at_any_position(position):
    """In float32 arithmetic the angle itself would be off by 8e-3 at position 262,143."""
    generator, shape = rng(position), shape_of()
    proj, (q_norm, k_norm) = projection(generator, 1, shape), norms(generator, shape)
    q, _ = attention.prepare(proj, q_norm, k_norm, position_of(position), shape, EPS)
    want, _ = reference.prepare(to_numpy(proj), to_numpy(q_norm), to_numpy(k_norm), np.array([position]), shape, EPS)
    assert_close("q", q, want, 4e-3)


@pytest.mark.parametrize("position", [1, 1000, 131_072, 262_143, 1_048_575])
def test_fixed_point_angles(position):
    """The angles without a norm or a rounding to bfloat16 around them."""
    high, low = (int_column.astype(object) for int_column in np.array(turns_per_position(64, 1e7)).T)
    turns = (high * 2**32 + low) * position % 2**64
    angles = turns.astype(np.float64) / 2**64 * 2 * np.pi
    want = position * 1e7 ** (-2.0 * np.arange(32) / 64)
    assert np.abs(np.exp(1j * angles) - np.exp(1j * want)).max() < 1e-8


def test_step_agrees_with_mlx():
    """mx.fast.rms_norm, rope and scaled_dot_product_attention as a second oracle."""
    generator, shape, length = rng(11), shape_of((16, 2)), 200
    proj, (q_norm, k_norm) = projection(generator, 1, shape), norms(generator, shape)
    keys, values = (random_rows(generator, length, shape) for _ in range(2))
    cache = cache_of(keys, values, shape)
    q, tail_keys, tail_values = attention.step_prepare(proj, q_norm, k_norm, position_of(length), cache, shape, EPS)
    cache = replace(cache, tail_keys=tail_keys, tail_values=tail_values)
    out = attention.step_attention(q, cache, position_of(length), proj, shape)

    heads = proj[:, : shape.key_offset].reshape(1, 16, 2, 256)
    x = mx.fast.rms_norm(heads[:, :, 0].astype(mx.float32), q_norm.astype(mx.float32), EPS)
    x = mx.fast.rope(x[:, :, None], 64, traditional=False, base=1e7, scale=1.0, offset=length)
    assert_close("q", q, to_numpy(x[0, :, 0]), 1e-2)
    all_keys, all_values = (
        mx.array(rows.transpose(1, 0, 2)[None].astype(np.float32)) for rows in rows_of(cache, length + 1)
    )
    y = mx.fast.scaled_dot_product_attention(x, all_keys, all_values, scale=256**-0.5)[0, :, 0]
    want = y * mx.sigmoid(heads[0, :, 1].astype(mx.float32))
    assert_close("attention", out, to_numpy(want).reshape(1, -1), 1e-2)
