"""Mixture-of-experts kernels on random routings, expert counts, widths and encodings, in checked mode."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from lily_mlx.kernels import moe
from lily_mlx.kernels.moe import policy, reference
from tests.kernels.moe.experts import UNIFORM, Format, make_experts
from tests.kernels.moe.test_prefill import reference_routing
from tests.support import bf16, to_numpy

from .profile import BITS, GROUPS, assert_near, choice, fuzz, offsets, placed, seeds

pytestmark = pytest.mark.checked

EPS = 1e-6
HIDDEN, OUT, SCORES = 1e-2, 6e-3, 1e-5
# (experts, top_k)
_COUNTS = ((5, 2), (33, 3))
_ALL_COUNTS = ((1, 1), (2, 2), (5, 2), (16, 4), (31, 4), (32, 8), (33, 3), (64, 17), (256, 8), (512, 10))
counts = choice(_COUNTS, _ALL_COUNTS)
kinds = st.sampled_from(("normal", "ties", "one expert", "two experts", "missing"))
heights = choice((None, 8), (None, *policy.TILE_HEIGHTS))
_FORMATS = ((UNIFORM, 64, 128), (Format((3, 32), (8, 64), (5, 64), (2, 32)), 64, 64))


def _all_formats() -> list[tuple[Format, int, int]]:
    """(encodings, I, H): every pair of bits and group size in each place, at widths that its groups divide."""
    pairs = [(bits, group) for bits in BITS for group in GROUPS]
    layouts = []
    for i in range(len(pairs)):
        places = [pairs[(i * step + step) % len(pairs)] for step in (1, 5, 7, 11)]
        layout = Format(*places)
        wide = max(layout.gate_up[1], layout.shared_gate_up[1])
        tall = max(layout.down[1], layout.shared_down[1])
        layouts += [(layout, tall, 3 * wide), (layout, 3 * tall, wide)]
    return layouts


layouts = choice(_FORMATS, (*_FORMATS, *_all_formats()))


def logits_of(generator: np.random.Generator, kind: str, rows: int, experts: int) -> mx.array:
    """Router logits, and the shared expert's gate in the last column."""
    logits = 2 * generator.standard_normal((rows, experts + 1))
    if kind == "ties":
        logits = np.round(logits / 2)
    elif kind == "one expert":
        logits[:, generator.integers(experts)] = 50.0
    elif kind == "two experts":
        logits[::2, 0] = logits[1::2, experts - 1] = 50.0
    elif kind == "missing":  # NaN ranks last; one number at least is left
        gone = generator.random((rows, experts)) < 0.3
        gone[:, generator.integers(experts)] = False
        logits[:, :-1][gone] = np.nan
    return mx.array(logits.astype(np.float32))


def check_blocks(routing: moe.Routing, experts: int) -> None:
    """Every row of the grouped arrays belongs to exactly one block, and that one is of its expert."""
    offsets, blocks = to_numpy(routing.offsets), to_numpy(routing.blocks).astype(np.int64)
    owner = np.full(routing.rows, -1)
    for expert, first, count, _ in blocks:
        assert count <= routing.tile_rows
        assert np.all(owner[first : first + count] == -1), "two blocks share a row"
        owner[first : first + count] = expert
    pairs = routing.tokens * routing.top_k
    want = np.concatenate([np.searchsorted(offsets[1:], np.arange(pairs), side="right"), [experts] * routing.tokens])
    assert np.array_equal(owner, want)


@fuzz(
    16,
    counts=counts,
    rows=st.integers(1, 70),
    kind=kinds,
    normalise=st.booleans(),
    height=heights,
    offset=offsets(),
    seed=seeds(),
)
def test_route(counts, rows, kind, normalise, height, offset, seed):
    generator, (experts, top_k) = np.random.default_rng(seed), counts
    logits = placed(logits_of(generator, kind, rows, experts), offset)
    routing = moe.route(logits, top_k, normalise, height)
    want = reference.route(to_numpy(logits), top_k, normalise)
    for name in ("experts", "offsets", "row_tokens", "slot_rows"):
        assert np.array_equal(to_numpy(getattr(routing, name)), getattr(want, name)), name
    assert_near("scores", routing.scores, want.scores, SCORES)
    check_blocks(routing, experts)


@fuzz(10, layout=layouts, counts=counts, kind=kinds, normalise=st.booleans(), seed=seeds())
def test_one_token(layout, counts, kind, normalise, seed):
    generator, (experts, top_k) = np.random.default_rng(seed), counts
    encodings, intermediate, hidden = layout
    weights, dense = make_experts(generator, experts, intermediate, hidden, encodings)
    x, residual = (bf16(generator.standard_normal((1, hidden))) for _ in range(2))
    gain, logits = bf16(generator.uniform(0.5, 1.5, hidden)), logits_of(generator, kind, 1, experts)
    got_hidden, routing = moe.experts_gate_up(x, gain, logits, weights, top_k, EPS, normalise)
    got = (got_hidden, *moe.split_routing(routing))
    want = reference.experts_gate_up(*map(to_numpy, (x, gain, logits)), dense, top_k, EPS, normalise)
    assert_near("hidden", got[0], want[0], HIDDEN)
    assert np.array_equal(to_numpy(got[1]), want[1])
    assert_near("scores", got[2], want[2], SCORES)
    out = moe.experts_down(got_hidden, routing, weights, residual)
    found = [to_numpy(array) for array in got]
    want_out = reference.experts_down(found[0], found[1].astype(np.int64), found[2], dense, to_numpy(residual))
    assert_near("out", out, want_out, OUT)


@fuzz(
    12,
    layout=layouts,
    counts=counts,
    tokens=st.integers(1, 40),
    kind=kinds,
    height=heights,
    offset=offsets(),
    seed=seeds(),
)
def test_chunk(layout, counts, tokens, kind, height, offset, seed):
    generator, (experts, top_k) = np.random.default_rng(seed), counts
    encodings, intermediate, hidden = layout
    weights, dense = make_experts(generator, experts, intermediate, hidden, encodings)
    x, residual = (placed(bf16(generator.standard_normal((tokens, hidden))), offset) for _ in range(2))
    routing = moe.route(logits_of(generator, kind, tokens, experts), top_k, True, height)
    same = reference_routing(routing)
    gate_up = moe.grouped_gate_up(x, routing, weights)
    assert_near("hidden", gate_up, reference.grouped_gate_up(to_numpy(x), same, dense), HIDDEN)
    down = moe.grouped_down(gate_up, routing, weights)
    assert_near("outputs", down, reference.grouped_down(to_numpy(gate_up), same, dense), HIDDEN)
    out = moe.combine(down, routing, residual)
    assert_near("out", out, reference.combine(to_numpy(down), same, to_numpy(residual)), OUT)
