"""Expert choice, stable sort and block map against numpy."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels.moe import Routing, policy, reference, route
from lily_mlx.kernels.moe.routing import block_capacity
from lily_mlx.metal import Kernel
from tests.support import FLOAT32_TOLERANCE, assert_close, rng, to_numpy


def check_routing(logits: np.ndarray, top_k: int, normalise: bool = True, tile_rows: int | None = None) -> Routing:
    """Routes and compares everything with the reference. Returns the routing."""
    logits = logits.astype(np.float32)
    got = route(mx.array(logits), top_k, normalise, tile_rows)
    want = reference.route(logits.astype(np.float64), top_k, normalise)
    for name in ("experts", "offsets", "row_tokens", "slot_rows"):
        np.testing.assert_array_equal(to_numpy(getattr(got, name)), getattr(want, name), err_msg=name)
    assert_close("scores", got.scores, want.scores, FLOAT32_TOLERANCE / 10)
    check_blocks(got)
    return got


def check_blocks(routing: Routing) -> None:
    """Every row of the grouped arrays is in exactly one block, and that block names its expert."""
    offsets, blocks = to_numpy(routing.offsets).astype(int), to_numpy(routing.blocks).astype(int)
    experts, pairs = offsets.size - 1, routing.tokens * routing.top_k
    assert len(blocks) == block_capacity(routing.tokens, routing.top_k, experts, routing.tile_rows)
    owner = np.full(routing.rows, -1)
    for expert, first, count, reserved in blocks:
        assert 0 <= count <= routing.tile_rows
        assert reserved == 0
        assert (owner[first : first + count] == -1).all(), "a row is in two blocks"
        owner[first : first + count] = expert
    want = np.repeat(np.arange(experts + 1), np.append(np.diff(offsets), routing.tokens))
    assert owner.size == want.size == pairs + routing.tokens
    np.testing.assert_array_equal(owner, want)


def random_logits(seed: int, tokens: int, experts: int) -> np.ndarray:
    return rng(seed).normal(0.0, 2.0, (tokens, experts + 1))


SIZES = [(7, experts, top_k) for experts in (4, 16, 33, 256) for top_k in (1, 2, 4, 8) if top_k <= experts]
SIZES += [(tokens, experts, top_k) for tokens in (1, 2, 33, 64, 130) for experts, top_k in ((33, 2), (256, 8))]
SIZES += [(3, 1, 1), (5, 512, 32), (2, 32, 32), (9, 31, 3)]


@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES, ids=lambda v: str(v))
def test_equals_a_stable_sort(tokens: int, experts: int, top_k: int) -> None:
    check_routing(random_logits(tokens + experts + top_k, tokens, experts), top_k)


@pytest.mark.parametrize("normalise", [True, False], ids=["over-chosen", "over-all"])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (33, 4), (256, 8)])
def test_scores(experts: int, top_k: int, normalise: bool) -> None:
    routing = check_routing(random_logits(11, 6, experts) * 3.0, top_k, normalise)
    totals = to_numpy(routing.scores)[:, :top_k].sum(axis=1)
    if normalise:
        np.testing.assert_allclose(totals, 1.0, rtol=1e-6)
    else:
        assert (totals < 1.0).all()


@pytest.mark.parametrize("height", policy.TILE_HEIGHTS)
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 64, 65, 130])
def test_block_map(tokens: int, height: int) -> None:
    check_routing(random_logits(5, tokens, 16), 4, tile_rows=height)


def test_equal_logits_choose_the_highest_ids() -> None:
    routing = check_routing(np.full((3, 257), 0.25), 8)
    assert to_numpy(routing.experts).tolist() == [list(range(255, 247, -1))] * 3


@pytest.mark.parametrize(
    ("logits", "top_k", "chosen"),
    [
        ([0.3, 0.7, 0.7, 0.7, 0.1], 2, [3, 2]),
        ([1.0, 4.0, 4.0, 4.0], 2, [3, 2]),
        ([0.0, -0.0, 0.0, -1.0], 2, [2, 1]),
        ([-0.0, 0.0, -0.0, -1.0], 3, [2, 1, 0]),
    ],
    ids=["three-tied", "lower-first", "negative-zero", "all-zeros"],
)
def test_ties_keep_the_higher_id(logits: list[float], top_k: int, chosen: list[int]) -> None:
    routing = check_routing(np.array([[*logits, 0.0]]), top_k)
    assert to_numpy(routing.experts).tolist() == [chosen]


@pytest.mark.parametrize("tied", [(31, 32), (0, 32, 64, 96), (30, 31, 32, 33, 63, 64), (5, 37, 38, 255)], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_ties_across_the_simdgroup(tied: tuple[int, ...], top_k: int) -> None:
    logits = random_logits(2, 1, 256)
    logits[0, list(tied)] = 50.0
    routing = check_routing(logits, top_k)
    expected = sorted(tied, reverse=True)[:top_k]
    assert to_numpy(routing.experts)[0, : len(expected)].tolist() == expected


def test_logits_that_are_not_finite() -> None:
    logits = random_logits(3, 5, 40)
    logits[0, [0, 5, 39]] = np.nan
    logits[1, 3:] = np.nan  # fewer numbers than top_k
    logits[2, :40] = -np.inf
    logits[3, :40] = np.nan
    logits[4, 7] = -np.inf
    routing = route(mx.array(logits.astype(np.float32)), 4, True)
    experts = to_numpy(routing.experts)
    want, _ = reference.select_experts(logits, 4, True)
    np.testing.assert_array_equal(experts, want)
    assert all(len(set(row)) == 4 for row in experts.tolist())
    check_blocks(routing)


@pytest.mark.parametrize("expert", [0, 100, 255])
@pytest.mark.parametrize("tokens", [1, 33, 130])
def test_one_expert_takes_all(tokens: int, expert: int) -> None:
    logits = random_logits(4, tokens, 256)
    logits[:, expert] = 90.0
    routing = check_routing(logits, 1)
    assert np.diff(to_numpy(routing.offsets).astype(int))[expert] == tokens


def test_alternating_between_first_and_last() -> None:
    logits = np.zeros((66, 257))
    logits[::2, 0] = 9.0
    logits[1::2, 255] = 9.0
    routing = check_routing(logits, 1)
    assert to_numpy(routing.row_tokens).tolist() == [*range(0, 66, 2), *range(1, 66, 2)]


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 4, 2), (16, 256, 8), (17, 33, 4), (64, 256, 8), (32, 512, 32)], ids=str
)
def test_one_launch_equals_three(tokens: int, experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(8, tokens, experts)
    one = check_routing(logits, top_k, tile_rows=8)
    monkeypatch.setattr(policy, "ONE_LAUNCH_ROWS", 0)
    three = check_routing(logits, top_k, tile_rows=8)
    for field in dataclasses.fields(Routing):
        got, want = getattr(one, field.name), getattr(three, field.name)
        assert mx.array_equal(got, want) if isinstance(got, mx.array) else got == want, field.name


@pytest.mark.parametrize(
    ("tokens", "top_k", "launches"),
    [(64, 4, 1), (65, 4, 3), (32, 32, 1), (33, 32, 3)],
    ids=["most-rows", "more-rows", "most-pairs", "more-pairs"],
)
def test_both_sides_of_one_launch(tokens: int, top_k: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    call = Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", lambda self, *a, **k: names.append(self.name) or call(self, *a, **k))
    check_routing(random_logits(9, tokens, 40), top_k)
    assert len(names) == launches


@pytest.mark.parametrize("tokens", [128, 129, 2048, 2049])
def test_both_sides_of_each_sort_width(tokens: int) -> None:
    widths = {policy.sort_threads(2 * t) for t in (128, 129, 2048, 2049)}
    assert len(widths) == 3
    check_routing(random_logits(6, tokens, 4), 2)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("metal", {1: 8, 256: 8, 257: 16, 512: 16, 513: 32, 1024: 32, 1025: 64, 8192: 64}),
        # A quarter more rows than the average.
        ("cuda", {1: 16, 409: 16, 410: 32, 819: 32, 820: 48, 1228: 48, 1229: 64, 1638: 64, 1639: 96, 2458: 128}),
    ],
)
def test_tile_height_grows_with_the_rows_per_expert(
    device: str, expected: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "current_backend", lambda: device)
    assert {tokens: policy.tile_height(tokens, 8, 256) for tokens in expected} == expected


@pytest.mark.parametrize(
    ("shape", "dtype", "top_k", "message"),
    [
        ((3,), mx.float32, 1, "expected \\[rows, experts \\+ 1\\]"),
        ((3, 1), mx.float32, 1, "expected \\[rows, experts \\+ 1\\]"),
        ((3, 9), mx.bfloat16, 1, "must be float32"),
        ((3, 9), mx.float32, 9, "choose 1 to 8"),
        ((3, 9), mx.float32, 0, "choose 1 to 8"),
        ((3, 65), mx.float32, 33, "choose 1 to 32"),
        ((3, 514), mx.float32, 8, "at most 512"),
        ((0, 9), mx.float32, 1, "0 rows"),
    ],
)
def test_errors(shape: tuple[int, ...], dtype: mx.Dtype, top_k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(mx.zeros(shape, dtype), top_k, True)


def test_unknown_tile_height() -> None:
    with pytest.raises(ValueError, match="tile_rows is 12"):
        route(mx.zeros((2, 9)), 2, True, tile_rows=12)
