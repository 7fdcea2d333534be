"""Decode of several sequences: their lengths differ in one batch, and their pages lie anywhere in the pool."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import attention
from lily_mlx.kernels.attention import TAIL_ROWS, YOUNG_PAGE, PagedCache, make_work, reference
from lily_mlx.kernels.attention.batch import item_capacity
from lily_mlx.kernels.attention.policy import PartsPlan, batch_plan
from lily_mlx.metal import checked
from tests.support import assert_close, bf16, rng, round_bf16, to_numpy

from .layer import EPS, HEADS, cache_of, norms, position_of, projection, random_rows, shape_of

LENGTHS = {
    "two": [0, 130],
    "around-a-tail": [1, 63, 64, 65, 127, 128, 129],
    "fresh-beside-long": [0, 1000, 5],
    "borders-of-pages": [255, 256, 257, 383, 384],
    "equal": [200, 200, 200],
}


class Batch:
    """Random sequences of given lengths, with undefined rows and pages NaN and pages in a random order."""

    def __init__(self, lengths, shape, seed, spare_pages=2):
        generator = rng(seed)
        self.lengths, self.shape = lengths, shape
        self.proj, self.gains = projection(generator, len(lengths), shape), norms(generator, shape)
        self.rows = [(random_rows(generator, n, shape), random_rows(generator, n, shape)) for n in lengths]
        counts = [n // TAIL_ROWS for n in lengths]
        order = generator.permutation(sum(counts) + spare_pages)
        self.pages = [list(order[sum(counts[:i]) : sum(counts[: i + 1])]) for i in range(len(counts))]
        size = (shape.kv_heads, TAIL_ROWS, shape.head_dim)
        pools = [np.full((len(order), *size), np.nan) for _ in range(2)]
        young, tails = ([np.full((len(lengths), *size), np.nan) for _ in range(2)] for _ in range(2))
        for row, (n, both) in enumerate(zip(lengths, self.rows, strict=True)):
            if row % 2 and self.pages[row]:
                self.pages[row][-1] = YOUNG_PAGE
            for pool, own, tail, values in zip(pools, young, tails, both, strict=True):
                for place, page in enumerate(self.pages[row]):
                    block = values[place * TAIL_ROWS : (place + 1) * TAIL_ROWS].transpose(1, 0, 2)
                    if page == YOUNG_PAGE:
                        own[row] = block
                    else:
                        pool[page] = block
                tail[row, :, : n % TAIL_ROWS] = values[n - n % TAIL_ROWS :].transpose(1, 0, 2)
        self.cache = PagedCache(*(bf16(array) for array in (*pools, *young, *tails)))

    @property
    def work(self):
        return make_work(self.lengths, self.pages)

    def step(self, plan=None):
        return attention.batch_step(self.proj, *self.gains, self.work, self.cache, self.shape, EPS, plan)

    def alone(self, row):
        """The single route's result for one sequence."""
        cache = cache_of(*self.rows[row], self.shape)
        proj = mx.contiguous(self.proj[row : row + 1])
        return attention.step(proj, *self.gains, position_of(self.lengths[row]), cache, self.shape, EPS)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_matches_the_reference(lengths):
    check(Batch(lengths, shape_of(), seed=sum(lengths)))


@pytest.mark.parametrize("heads", list(HEADS.values())[1:], ids=list(HEADS)[1:])
def test_other_groups(heads):
    check(Batch([0, 127, 128, 301], shape_of(heads), seed=21))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 0), (64, 16), (96, 32), (128, 32)])
def test_other_head_sizes(head_dim, rotary_dim):
    check(Batch([200, 3], shape_of((4, 2), head_dim=head_dim, rotary_dim=rotary_dim), seed=head_dim))


@pytest.mark.parametrize(
    "plan",
    [
        PartsPlan(part_rows=TAIL_ROWS, heads=8, head_sets=1, streams=4),
        PartsPlan(part_rows=TAIL_ROWS, heads=4, head_sets=2, streams=4),
        PartsPlan(part_rows=TAIL_ROWS, heads=8, head_sets=1, streams=1),
    ],
    ids=lambda plan: f"{plan.head_sets}-sets-{plan.streams}-streams",
)
def test_every_plan_gives_the_same_result(plan):
    check(Batch([63, 130, 513], shape_of(), seed=31), plan)


def check(batch, plan=None):
    before = [to_numpy(array) for array in vars(batch.cache).values()]
    out, after = batch.step(plan)
    for array, old in zip(vars(batch.cache).values(), before, strict=True):
        np.testing.assert_array_equal(to_numpy(array), old)
    assert after.keys is batch.cache.keys
    assert after.values is batch.cache.values
    want, want_after = reference.batch_step(
        to_numpy(batch.proj), *map(to_numpy, batch.gains), batch.lengths, batch.pages, reference.PagedCache(*before),
        batch.shape, EPS,
    )  # fmt: skip
    assert_close("attention", out, want, 1e-2)
    for row, length in enumerate(batch.lengths):
        new = length % TAIL_ROWS
        keys, values = to_numpy(after.tail_keys[row]), to_numpy(after.tail_values[row])
        np.testing.assert_array_equal(keys[:, :new], want_after.tail_keys[row, :, :new])
        np.testing.assert_array_equal(values[:, : new + 1], want_after.tail_values[row, :, : new + 1])
        assert_close(f"k of sequence {row}", keys[:, new], want_after.tail_keys[row, :, new], 4e-3)


def test_the_last_position_of_the_longest_context():
    check(Batch([3, 262_143], shape_of((2, 1), head_dim=32, rotary_dim=32), seed=9))


def test_agrees_with_the_single_route():
    batch = Batch([0, 63, 500, 128], shape_of((16, 2)), seed=41)
    out, after = batch.step()
    for row, length in enumerate(batch.lengths):
        want, cache = batch.alone(row)
        assert_close(f"sequence {row}", out[row : row + 1], to_numpy(want), 1e-2)
        new = length % TAIL_ROWS
        assert np.array_equal(to_numpy(after.tail_keys[row][:, : new + 1]), to_numpy(cache.tail_keys[:, : new + 1]))
        assert np.array_equal(to_numpy(after.tail_values[row][:, : new + 1]), to_numpy(cache.tail_values[:, : new + 1]))


def test_a_sequence_does_not_depend_on_the_others():
    """Bit for bit the same with another neighbour, another place in the batch and other pages."""
    shape = shape_of()
    many = Batch([500, 63, 1000, 0, 130], shape, seed=51)
    few = Batch([7, 1000], shape, seed=52)
    few.gains = many.gains
    few.proj = mx.concatenate([few.proj[:1], many.proj[2:3]])
    own = mx.array(np.array(many.pages[2], np.int32))
    few_pools = [mx.concatenate([pool[own], pool[:1]]) for pool in (many.cache.keys, many.cache.values)]
    few.pages = [[], list(range(7))]
    tails = [mx.concatenate([a[:1], b[2:3]]) for a, b in (
        (few.cache.tail_keys, many.cache.tail_keys), (few.cache.tail_values, many.cache.tail_values)
    )]  # fmt: skip
    few.cache = PagedCache(*few_pools, few.cache.young_keys, few.cache.young_values, *tails)
    assert np.array_equal(to_numpy(many.step()[0][2]), to_numpy(few.step()[0][1]))


def test_rows_after_the_new_one_stay_unwritten(kernel_backend):
    if kernel_backend != "cpu":
        pytest.skip("only the checked mode of the cpu backend fills outputs with NaN")
    batch = Batch([10, 130], shape_of((4, 2), head_dim=64), seed=61)
    with checked():
        _, after = batch.step()
    for row, new in enumerate((10, 2)):
        assert np.isnan(to_numpy(after.tail_keys[row, :, new + 1 :])).all()
        assert np.isnan(to_numpy(after.tail_values[row, :, new + 1 :])).all()


def test_large_scores_do_not_overflow():
    batch = Batch([200, 130], shape_of(), seed=71)
    names = ("keys", "young_keys", "tail_keys")
    batch.cache = replace(batch.cache, **{name: bf16(to_numpy(getattr(batch.cache, name)) * 128) for name in names})
    batch.rows = [(round_bf16(keys * 128), values) for keys, values in batch.rows]
    out, _ = batch.step()
    for row in range(2):
        assert_close(f"sequence {row}", out[row : row + 1], to_numpy(batch.alone(row)[0]), 1e-2)


@pytest.mark.parametrize("count", [1, 16, 17, 31, 32, 33, 100, 1000, 8191, 8193, 65_536])
def test_the_list_of_items_is_little_longer_than_needed(count):
    assert count <= item_capacity(count) <= max(16, count * 1.25 + 1)
    sizes = {item_capacity(n) for n in range(1, count + 1)}
    assert len(sizes) <= 1 + 4 * max(0, count.bit_length() - 4)


@pytest.mark.parametrize("group", [1, 3, 8, 11, 16])
def test_the_plan_fits_a_page(group):
    plan = batch_plan(group)
    assert plan.part_rows == TAIL_ROWS
    assert plan.heads * plan.head_sets >= group
    assert plan.threads <= 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"proj": mx.zeros((2, 5119), mx.bfloat16)}, "batch_step: proj must be"),
        ({"q_norm": mx.zeros(255, mx.bfloat16)}, "batch_step: q_norm must be"),
        ({"work": make_work([0, 0, 0], [[], [], []])}, "batch_step: work.places must be"),
        ({"plan": PartsPlan(64, 8, 1, 8)}, "parts of 64 rows"),
    ],
    ids=["projection-width", "norm-size", "other-batch", "part-rows"],
)
def test_wrong_arguments_are_refused(change, message):
    batch = Batch([0, 5], shape_of(), seed=81)
    good = {
        "proj": batch.proj,
        "q_norm": batch.gains[0],
        "k_norm": batch.gains[1],
        "work": batch.work,
        "cache": batch.cache,
    }
    with pytest.raises(ValueError, match=message):
        attention.batch_step(**(good | change), shape=batch.shape, eps=EPS)


def test_pages_must_fit_the_length():
    with pytest.raises(ValueError, match="sequence 1 of 128 tokens has 0 pages"):
        make_work([3, 128], [[], []])
