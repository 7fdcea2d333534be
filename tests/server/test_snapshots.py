"""Snapshots: the same state comes back, and those of one conversation share its keys and values."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from lily_mlx.checkpoints import bundled_checkpoint
from lily_mlx.engine import Engine, make_sampling
from lily_mlx.model import Model
from lily_mlx.server.prefix_cache import PrefixCache
from lily_mlx.server.snapshots import Snapshot
from tests.support import rng

from .states import BLOCK_BYTES, STATE_BYTES, made_state, same


def tokens(count, seed=0):
    return [int(token) for token in rng(seed).integers(1, 300, count)]


@pytest.mark.parametrize("length", [1, 127, 128, 129, 256, 300, 1000])
def test_a_state_comes_back(length):
    state = made_state(tokens(length))
    assert same(Snapshot.of(state).state(), state)


@pytest.mark.parametrize("shared", [0, 1, 2, 9])
def test_blocks_of_another_snapshot_are_taken(shared):
    text = tokens(400)
    other = Snapshot.of(made_state(text[:256] + tokens(300, seed=1)))
    snapshot = Snapshot.of(made_state(text), other.blocks[: min(shared, 2)])
    assert same(snapshot.state(), made_state(text))
    taken = [block is known for block, known in zip(snapshot.blocks, other.blocks, strict=False)]
    assert taken[:3] == [i < min(shared, 2) for i in range(3)]


def test_generation_goes_on_from_a_snapshot():
    engine, sampling = Engine(Model.load(bundled_checkpoint())), make_sampling()
    state = engine.prefill(engine.empty(), tokens(130), sampling)
    restored = Snapshot.of(state).state()
    for _ in range(2):
        expected = engine.prefill(state, [7, 8, 9], sampling)
        got = engine.prefill(restored, [7, 8, 9], sampling)
        assert mx.array_equal(got.logits, expected.logits)


def test_snapshots_of_one_conversation_cost_its_keys_and_values_once():
    """N snapshots: the blocks of the longest, and N states."""
    cache, text = PrefixCache(10**9), tokens(1280)
    lengths = [1280, 100, 130, 600, 1200, 601]
    for length in lengths:
        cache.insert(text[:length], made_state(text[:length]))
    assert cache.bytes == 10 * BLOCK_BYTES + len(lengths) * STATE_BYTES
    other = text[:600] + tokens(300, seed=5)
    cache.insert(other, made_state(other))  # 7 blocks, 4 of them shared
    assert cache.bytes == 13 * BLOCK_BYTES + (len(lengths) + 1) * STATE_BYTES
    for length in lengths:
        found, _ = cache.longest([*text[:length], 1000])
        assert same(found.state(), made_state(text[:length]))
    found, _ = cache.longest([*other, 1000])
    assert same(found.state(), made_state(other))
    cache.clear()
    assert cache.bytes == 0


def test_memory_is_given_back():
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    cache, text = PrefixCache(10**9), tokens(1280)
    for length in (1280, 600, 1200):
        cache.insert(text[:length], made_state(text[:length]))
    mx.synchronize()
    assert mx.get_active_memory() - before <= cache.bytes * 1.02 + 4096
    cache.clear()
    mx.synchronize()
    assert mx.get_active_memory() - before <= 4096


@pytest.mark.parametrize("seed", range(3))
def test_bytes_and_contents_under_a_budget(seed):
    """Whatever goes and comes: what is found is right, and the bytes are those of the arrays that are held."""
    draw = random.Random(int(rng(seed).integers(1 << 30)))
    base = [tokens(700, seed=s) for s in range(2)]
    cache = PrefixCache(20 * BLOCK_BYTES)
    for _ in range(60):
        text = base[draw.randrange(2)][: draw.randint(1, 700)] + tokens(draw.choice((0, 0, 150)), draw.randrange(3))
        if draw.random() < 0.6:
            cache.insert(text, made_state(text), disposable=draw.random() < 0.3)
        else:
            found, _ = cache.longest(text)
            if found is not None:
                assert same(found.state(), made_state(text[: found.length]))
        held = {id(array): array for n in cache._nodes() if n.snapshot for array in n.snapshot.arrays}
        assert cache.bytes == sum(array.nbytes for array in held.values()) <= cache.max_bytes
    assert cache.evictions
