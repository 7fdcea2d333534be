"""The compiled step: when it is traced, and what it returns. Kernels are replaced by zeros of their outputs' shapes,
because without a GPU MLX accepts Metal kernels only while it exports a graph."""

from __future__ import annotations

import sys
from dataclasses import replace

import mlx.core as mx
import pytest

from lily_mlx.doctor import selftest
from lily_mlx.engine import Engine, make_sampling
from lily_mlx.metal import backend, use_backend
from lily_mlx.model import Model, ModelConfig, arrays_of
from lily_mlx.model import model as model_module
from lily_mlx.model.abstract import abstract_weights

from . import synthetic
from .test_trace import grown


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    def launch(launch):
        return [mx.zeros(s, d) for s, d in zip(launch.output_shapes, launch.output_dtypes, strict=True)]

    monkeypatch.setattr(backend, "launcher", lambda name: launch)
    monkeypatch.setenv(selftest.ENVIRONMENT, "0")  # the first engine on `metal` would find that zeros are wrong


@pytest.fixture
def traces(monkeypatch):
    """Counts how often the step is traced."""
    count = []
    decode_step = model_module.decode_step

    def counted(*arguments):
        count.append(1)
        return decode_step(*arguments)

    monkeypatch.setattr(model_module, "decode_step", counted)
    return count


@pytest.fixture
def model():
    config = ModelConfig.from_dict(synthetic.config())
    return Model(config, abstract_weights(config))


def first_state(model):
    return replace(Engine(model).empty(), token=mx.zeros(1, mx.uint32))


def test_step_is_traced_once_for_each_capacity(model, traces):
    engine, sampling, state = Engine(model), make_sampling(), first_state(model)
    with use_backend("metal", tracing=True):
        for _ in range(3):
            state = engine.step(state, sampling)
        engine.step(state, make_sampling(0.7, seed=5))
        assert len(traces) == 1
        model.step(state.token, state.position, grown(state.caches, 512), sampling)
        assert len(traces) == 2


def test_step_is_traced_once_for_each_form_of_sampling(model, traces):
    engine, state = Engine(model), first_state(model)
    forms = [
        {"temp": 0.5},
        {"temp": 0.5, "top_p": 0.9},
        {"temp": 0.5, "top_k": 3, "presence_penalty": 1.0},
        {"presence_penalty": 1.0},
    ]
    with use_backend("metal", tracing=True):
        for count, options in enumerate(forms, 1):
            for _ in range(2):
                after = engine.step(engine.step(state, make_sampling(**options)), make_sampling(**options))
                assert (after.recent is not None) == ("presence_penalty" in options)
            assert len(traces) == count
        engine.step(state, make_sampling(0.9, 3, min_p=0.1))
        engine.step(state, make_sampling(frequency_penalty=0.1, repetition_penalty=1.5, logit_bias={1: 2.0}))
        assert len(traces) == len(forms)


def test_step_keeps_shapes_and_dtypes(model):
    sampling, before = make_sampling(), first_state(model)
    with use_backend("metal", tracing=True):
        after = Engine(model).step(before, sampling)
    assert after.length == 1
    assert (after.token.shape, after.token.dtype) == ((1,), mx.uint32)
    assert (after.position.shape, after.position.dtype) == ((1,), mx.int32)
    assert (after.logits.shape, after.logits.dtype) == ((1, model.config.vocab_size), mx.float32)
    for old, new in zip(arrays_of(before.caches), arrays_of(after.caches), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)


def test_what_is_compiled_keeps_no_state(model):
    """One state of the full-size model is 61 MB and more."""
    state, sampling = first_state(model), make_sampling()
    array = state.caches[0].state
    before = sys.getrefcount(array)
    step = model._compile(sampling, None, state.caches)
    chunk = model._compile_chunk(7, 0, sampling, None, state.caches)
    assert sys.getrefcount(array) == before
    assert step is not chunk


def test_chunks_of_many_lengths_make_room_for_each_other(model, monkeypatch):
    monkeypatch.setattr(model_module, "MOST_COMPILED_CHUNKS", 2)
    compiled = []
    compile_chunk = Model._compile_chunk
    monkeypatch.setattr(
        Model, "_compile_chunk", lambda self, rows, *rest: compiled.append(rows) or compile_chunk(self, rows, *rest)
    )
    engine, state, sampling = Engine(model), first_state(model), make_sampling()
    with use_backend("metal", tracing=True):
        for rows in (3, 5, 3, 7, 3, 5):
            engine.prefill(state, list(range(rows)), sampling)
    assert compiled == [3, 5, 7, 5]


def test_a_short_context_after_a_long_one_with_as_many_rows(model):
    """The trace of a chunk holds the length of the context that it was traced with."""
    engine, sampling = Engine(model), make_sampling()
    with use_backend("metal", tracing=True):
        for length in (600, 20, 300, 600):
            state = engine.prefill(engine.empty(), [1] * length, sampling)
            assert engine.prefill(state, [1] * 10, sampling).length == length + 10
            assert engine.prefill(state, [1] * 120, sampling).length == length + 120
