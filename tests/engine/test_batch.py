"""Sequences that advance together: the same tokens as alone, whoever joins and leaves."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.engine import DecodeBatch, Engine, make_sampling, recent_tokens
from lily_mlx.engine import batch as batch_module
from lily_mlx.engine.batch import bucket_for
from lily_mlx.engine.sampling import resized_memory
from lily_mlx.kernels.attention import YOUNG_PAGE
from lily_mlx.kernels.sampling import NO_TOKEN
from lily_mlx.model import Model, arrays_of
from tests.model import synthetic
from tests.support import rng, to_numpy

GREEDY = make_sampling()
PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "frequency_context_size": 50}
OPTIONS = [
    {},
    {"temp": 0.9, "seed": 5},
    {"temp": 0.8, "seed": 6, "top_p": 0.9, "top_k": 40},
    {"temp": 1.0, "seed": 7, **PENALISED},
    {"logit_bias": {3: 4.0, 9: -2.0}, "presence_penalty": 0.8},
    {"temp": 1.0, "seed": 8, "min_p": 0.05, "repetition_penalty": 1.1},
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    # All experts are chosen, so that rounding cannot change the routing.
    settings = synthetic.config(num_experts_per_tok=8, num_hidden_layers=2, full_attention_interval=2)
    return Engine(Model.load(synthetic.write_checkpoint(tmp_path_factory.mktemp("model"), settings)))


def prompt(count: int, seed: int) -> list[int]:
    return rng(seed).integers(0, 320, count).tolist()


def prefilled(engine, tokens, sampling=GREEDY):
    return engine.prefill(engine.empty(), tokens, sampling)


def alone(engine, state, sampling, count):
    chosen = []
    for _ in range(count):
        chosen.append(int(state.token.item()))
        state = engine.step(state, sampling)
    return chosen


def together(batch, count):
    chosen = {}
    for _ in range(count):
        for handle, one in batch.step().items():
            chosen.setdefault(handle, []).append(one.token)
    return chosen


def test_sequences_of_several_lengths_and_samplings(engine):
    samplings = [make_sampling(**options) for options in OPTIONS]
    states = [prefilled(engine, prompt(n, n), s) for n, s in zip((1, 63, 64, 126, 127, 260), samplings, strict=True)]
    want = [alone(engine, state, sampling, 6) for state, sampling in zip(states, samplings, strict=True)]
    batch = DecodeBatch(engine)
    handles = [batch.add(state, sampling) for state, sampling in zip(states, samplings, strict=True)]
    chosen = together(batch, 6)
    assert [chosen[handle] for handle in handles] == want


def test_joining_and_leaving_disturbs_nobody(engine):
    """Every sequence has its tokens, in whichever row and beside whichever others."""
    states = [prefilled(engine, prompt(n, n)) for n in (100, 120, 5, 127, 130)]
    want = [alone(engine, state, GREEDY, 13) for state in states]
    batch, handles = DecodeBatch(engine), {}
    got = [[] for _ in states]

    def run(count):
        for _ in range(count):
            chosen = batch.step()
            assert set(chosen) == set(handles.values())
            for index, handle in handles.items():
                got[index].append(chosen[handle].token)

    for index in (0, 1):
        handles[index] = batch.add(states[index], GREEDY)
    run(2)
    for index in (2, 3, 4):
        handles[index] = batch.add(states[index], GREEDY)
        run(1)
    for index in (0, 3, 4):  # the first, one in the middle, the last
        batch.remove(handles.pop(index))
        run(2)
    handles[0] = batch.add(states[0], GREEDY)
    got[0] = []
    run(2)
    assert got == [own[: len(mine)] for own, mine in zip(want, got, strict=True)]
    assert [len(mine) for mine in got] == [2, 13, 11, 4, 5]


def test_a_state_goes_on_alone(engine):
    """What leaves is what a single step would have left; the batch goes on from its own."""
    sampling = make_sampling(**PENALISED)
    tokens = prompt(250, 1)
    state = prefilled(engine, tokens, sampling)
    other = prefilled(engine, prompt(20, 2))
    want = alone(engine, state, sampling, 20)
    batch = DecodeBatch(engine)
    handle, _ = batch.add(state, sampling), batch.add(other, GREEDY)
    chosen = together(batch, 10)[handle]
    left = batch.state(handle)
    assert left.length == 260
    np.testing.assert_array_equal(np.array(left.recent), np.array(recent_tokens([*tokens, *chosen], sampling)))
    assert chosen + alone(engine, left, sampling, 10) == want
    assert chosen + together(batch, 10)[handle] == want
    again = DecodeBatch(engine)
    handle = again.add(left, sampling)
    assert together(again, 10)[handle] == want[10:]


def test_a_snapshot_holds_arrays_of_its_own(engine):
    batch = DecodeBatch(engine)
    handles = [batch.add(prefilled(engine, prompt(n, n)), GREEDY) for n in (140, 20)]
    batch.step()
    left = batch.state(handles[0])
    before = [to_numpy(array) for array in arrays_of(left.caches)]
    batch.remove(handles[0])
    together(batch, 3)
    for old, array in zip(before, arrays_of(left.caches), strict=True):
        np.testing.assert_array_equal(to_numpy(array), old)


@pytest.mark.parametrize(("count", "tolerance"), [(7, 0.0), (9, 3e-2)], ids=["the-same-tiles", "other-tiles"])
def test_a_sequence_does_not_depend_on_the_others(engine, count, tolerance):
    """The logits of a batch of two and of a larger one: bit for bit where both take the same tiles."""
    states = [prefilled(engine, prompt(10 + 9 * i, i)) for i in range(count)]
    logits = []
    for size in (2, count):
        batch = DecodeBatch(engine)
        handles = [batch.add(state, GREEDY) for state in states[:size]]
        rows = []
        for _ in range(3):
            rows.append(np.array(batch.step()[handles[1]].logits))
        logits.append(rows)
    assert np.abs(np.subtract(*logits)).max() <= tolerance * np.abs(logits[0]).max()


def test_logits_agree_with_the_single_route(engine):
    states = [prefilled(engine, prompt(n, n)) for n in (3, 127, 128)]
    batch = DecodeBatch(engine)
    handles = [batch.add(state, GREEDY) for state in states]
    for _ in range(4):
        chosen = batch.step()
        for handle, state in zip(handles, states, strict=True):
            want = to_numpy(state.logits)
            assert np.abs(to_numpy(chosen[handle].logits) - want).max() <= 3e-2 * np.abs(want).max()
        states = [engine.step(state, GREEDY) for state in states]


@pytest.mark.parametrize("steps", [300])
def test_pages_come_and_go(engine, steps):
    """The pool grows where it must, gives pages back, and memory returns to what it was."""
    state = prefilled(engine, prompt(120, 1))
    mx.eval(arrays_of(state.caches))
    batch = DecodeBatch(engine)
    first, second = batch.add(state, GREEDY), batch.add(state, GREEDY)
    chosen = together(batch, steps)
    assert chosen[first] == chosen[second]
    third = batch.add(batch.state(first), GREEDY)
    pages = [row.pages for row in batch._rows]
    assert [len(own) for own in pages] == [(120 + steps) // 128] * 3
    assert [own.count(YOUNG_PAGE) for own in pages] == [1, 1, 0]
    in_pool = [page for own in pages for page in own if page != YOUNG_PAGE]
    assert len(set(in_pool)) == len(in_pool)
    batch.remove(first)
    batch.remove(third)
    again = [batch.add(batch.state(second), GREEDY) for _ in range(12)]
    assert batch.pages >= 13 * 3
    for handle in (second, *again):
        batch.remove(handle)
    assert (len(batch), batch.rows, batch.pages) == (0, 0, 0)
    assert batch.step() == {}


def test_memory_does_not_grow(engine):
    state = prefilled(engine, prompt(130, 1))
    batch = DecodeBatch(engine)
    for _ in range(3):
        batch.add(state, GREEDY)
    together(batch, 5)
    mx.eval(arrays_of((batch._tokens, batch._memories, batch._pools)))
    before = mx.get_active_memory()
    for _ in range(4):
        together(batch, 5)
        handle = batch.add(state, GREEDY)
        together(batch, 2)
        batch.state(handle)
        batch.remove(handle)
    together(batch, 1)
    mx.eval(arrays_of((batch._tokens, batch._memories, batch._pools)))
    assert mx.get_active_memory() <= 1.01 * before


def fail(*_):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("owner", "name"), [(Model, "batch_step"), (batch_module.np, "array")], ids=["the-submission", "reading-the-tokens"]
)
def test_a_failed_step_changes_nothing(owner, name, engine, monkeypatch):
    state = prefilled(engine, prompt(9, 1))
    want = alone(engine, state, GREEDY, 4)
    batch = DecodeBatch(engine)
    handle, _ = batch.add(state, GREEDY), batch.add(state, GREEDY)
    chosen = together(batch, 2)[handle]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            batch.step()
    assert chosen + together(batch, 2)[handle] == want


def test_a_sequence_that_cannot_join_leaves_nothing_behind(engine, monkeypatch):
    states = [prefilled(engine, prompt(9 + i, i)) for i in range(3)]
    want = [alone(engine, state, GREEDY, 3) for state in states]
    batch = DecodeBatch(engine)
    first = batch.add(states[0], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(DecodeBatch, "_put", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            batch.add(states[1], GREEDY)
    assert len(batch) == 1
    third = batch.add(states[2], GREEDY)
    chosen = together(batch, 3)
    assert chosen == {first: want[0], third: want[2]}


@pytest.mark.parametrize(("sequences", "rows"), [(1, 2), (2, 2), (5, 6), (9, 12), (17, 24), (32, 32), (33, 48)])
def test_buckets(sequences, rows):
    assert bucket_for(sequences) == rows


@pytest.mark.parametrize("length", [0, 5, 32, 40, 100])
@pytest.mark.parametrize(("size", "other"), [(32, 64), (64, 32), (32, 32)])
def test_memories_of_another_size(length, size, other):
    tokens = prompt(length, length)

    def memory(slots):
        recent = np.full(slots, NO_TOKEN, np.uint32)
        for position in range(max(0, length - slots), length):
            recent[position % slots] = tokens[position]
        return recent

    got = np.array(resized_memory(mx.array(memory(size)), length, other))
    kept = memory(other)
    if other > size:  # what the small one has forgotten
        forgotten = [p % other for p in range(max(0, length - other), max(0, length - size))]
        kept[forgotten] = NO_TOKEN
    np.testing.assert_array_equal(got, kept)


def test_wrong_arguments_are_refused(engine):
    batch = DecodeBatch(engine)
    with pytest.raises(ValueError, match="no chosen token"):
        batch.add(engine.empty(), GREEDY)
    with pytest.raises(ValueError, match="token id 100000"):
        batch.add(prefilled(engine, [1]), make_sampling(logit_bias={100_000: 1.0}))
    with pytest.raises(KeyError, match="no sequence 7"):
        batch.remove(7)
