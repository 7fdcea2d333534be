"""Decode: one token against the cache, around every border of blocks, parts and capacities."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import attention
from lily_mlx.kernels.attention import reference
from lily_mlx.kernels.attention.policy import PartsPlan, part_rows, parts_plan
from lily_mlx.kernels.attention.rope import turns_per_position
from lily_mlx.metal import checked
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
LENGTHS = [0, 1, 63, 64, 65, 126, 127, 128, 129, 191, 192, 255, 256, 300]


@pytest.mark.parametrize("length", LENGTHS)
def test_step_matches_the_reference(length):
    check_step(length, shape_of(), seed=2000 + length)


@pytest.mark.parametrize("heads", list(HEADS.values())[1:], ids=list(HEADS)[1:])
@pytest.mark.parametrize("length", [0, 127, 128, 301])
def test_step_with_other_groups(heads, length):
    check_step(length, shape_of(heads), seed=2000 + length)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("rotary_dim", [0, 16, 32])
def test_step_with_other_head_sizes(head_dim, rotary_dim):
    check_step(200, shape_of((4, 2), head_dim=head_dim, rotary_dim=rotary_dim), seed=head_dim)


@pytest.mark.parametrize("length", [64, 200])
@pytest.mark.parametrize("capacity", [256, 512, 4096, 4224, 8192, 16512])
def test_unused_capacity_is_not_read(capacity, length):
    """On both sides of the capacities at which the parts grow, and with one tail part or two."""
    check_step(length, shape_of(), seed=capacity, capacity=capacity)


@pytest.mark.parametrize(
    "plan",
    [
        PartsPlan(part_rows=32, heads=8, head_sets=1, streams=8),
        PartsPlan(part_rows=64, heads=8, head_sets=1, streams=8),
        PartsPlan(part_rows=64, heads=8, head_sets=1, streams=1),
        PartsPlan(part_rows=128, heads=8, head_sets=1, streams=4),
        PartsPlan(part_rows=256, heads=4, head_sets=2, streams=4),
        PartsPlan(part_rows=512, heads=8, head_sets=1, streams=8),
        PartsPlan(part_rows=1024, heads=8, head_sets=1, streams=8),
        PartsPlan(part_rows=2048, heads=8, head_sets=1, streams=8),
    ],
    ids=lambda plan: f"parts-of-{plan.part_rows}-{plan.head_sets}-sets-{plan.streams}-streams",
)
@pytest.mark.parametrize("length", [63, 130, 513])
def test_every_plan_gives_the_same_result(plan, length):
    check_step(length, shape_of(), seed=3000 + length, plan=plan)


def test_the_last_position_of_the_longest_context():
    check_step(262_143, shape_of((2, 1), head_dim=32, rotary_dim=32), seed=9)


def test_large_scores_do_not_overflow():
    check_step(200, shape_of(), seed=7, key_scale=128.0, relative=2e-2)


def test_rows_after_the_new_one_stay_unwritten(kernel_backend):
    """A second tail part that has no rows yet writes none."""
    if kernel_backend != "cpu":
        pytest.skip("only the checked mode of the cpu backend fills outputs with NaN")
    generator, shape, length = rng(5), shape_of((4, 2), head_dim=64), 10
    cache = cache_of(random_rows(generator, length, shape), random_rows(generator, length, shape), shape)
    proj, gains = projection(generator, 1, shape), norms(generator, shape)
    with checked():
        _, after = attention.step(proj, *gains, position_of(length), cache, shape, EPS)
    assert np.isnan(to_numpy(after.tail_keys[:, length + 1 :])).all()
    assert np.isnan(to_numpy(after.tail_values[:, length + 1 :])).all()


def check_step(length, shape, seed, capacity=None, plan=None, key_scale=1.0, relative=1e-2):
    """The new tail row by row, and the attention over what the cache then holds."""
    generator = rng(seed)
    proj, gains = projection(generator, 1, shape), norms(generator, shape)
    keys, values = (random_rows(generator, length, shape) for _ in range(2))
    keys = round_bf16(keys * key_scale)
    cache = cache_of(keys, values, shape, capacity)
    before = [to_numpy(array) for array in vars(cache).values()]
    out, after = attention.step(proj, *gains, position_of(length), cache, shape, EPS, plan)

    row, tail_begin = length % attention.TAIL_ROWS, length - length % attention.TAIL_ROWS
    assert after.keys is cache.keys
    assert after.values is cache.values
    for array, old in zip(vars(cache).values(), before, strict=True):
        np.testing.assert_array_equal(to_numpy(array), old)
    tail_keys, tail_values = (to_numpy(a).transpose(1, 0, 2) for a in (after.tail_keys, after.tail_values))
    np.testing.assert_array_equal(tail_keys[:row], keys[tail_begin:])
    np.testing.assert_array_equal(tail_values[:row], values[tail_begin:])
    position = np.array([length])
    want_q, want_k = reference.prepare(to_numpy(proj), *map(to_numpy, gains), position, shape, EPS)
    assert_close("k", tail_keys[row], want_k[0], 4e-3)
    np.testing.assert_array_equal(tail_values[row], reference.split_projection(to_numpy(proj), shape)[3][0])

    all_keys = np.concatenate([keys, tail_keys[row : row + 1]])
    all_values = np.concatenate([values, tail_values[row : row + 1]])
    want = attend(round_bf16(want_q), all_keys, all_values, length, proj, shape)
    assert_close("attention", out, want, relative)


@pytest.mark.parametrize("capacity", [256, 4096, 8192, 16384, 24576, 32768, 65536, 73728, 131072, 139264, 262144])
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
    out, cache = attention.step(proj, q_norm, k_norm, position_of(length), cache, shape, EPS)

    heads = proj[:, : shape.key_offset].reshape(1, 16, 2, 256)
    x = mx.fast.rms_norm(heads[:, :, 0].astype(mx.float32), q_norm.astype(mx.float32), EPS)
    x = mx.fast.rope(x[:, :, None], 64, traditional=False, base=1e7, scale=1.0, offset=length)
    all_keys, all_values = (
        mx.array(rows.transpose(1, 0, 2)[None].astype(np.float32)) for rows in rows_of(cache, length + 1)
    )
    y = mx.fast.scaled_dot_product_attention(x, all_keys, all_values, scale=256**-0.5)[0, :, 0]
    want = y * mx.sigmoid(heads[0, :, 1].astype(mx.float32))
    assert_close("attention", out, to_numpy(want).reshape(1, -1), 1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"proj": mx.zeros((2, 5120), mx.bfloat16)}, r"step: proj must be"),
        ({"q_norm": mx.zeros(255, mx.bfloat16)}, r"step: q_norm must be"),
        ({"k_norm": mx.zeros(256)}, r"step: k_norm must be"),
        ({"position": mx.array([1], mx.uint32)}, r"step: position must be"),
        ({"cache": attention.empty_cache(shape_of((8, 2)))}, r"step: cache.keys must be"),
    ],
    ids=["two-rows", "norm-size", "norm-dtype", "position-dtype", "other-heads"],
)
def test_wrong_arguments_are_refused(change, message):
    shape = shape_of()
    good = {
        "proj": mx.zeros((1, shape.projection_width), mx.bfloat16),
        "q_norm": mx.ones(256, mx.bfloat16),
        "k_norm": mx.ones(256, mx.bfloat16),
        "position": position_of(0),
        "cache": attention.empty_cache(shape),
    }
    with pytest.raises(ValueError, match=message):
        attention.step(**(good | change), shape=shape, eps=EPS)
