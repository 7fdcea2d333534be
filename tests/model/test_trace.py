"""The full-size model's step and chunk, traced without a GPU: every computation is one of our kernels."""

from __future__ import annotations

import re
from collections import Counter

import mlx.core as mx
import pytest

from compare.full_size import configuration
from compare.graph import Graph, trace
from lily_mlx.engine import make_sampling
from lily_mlx.metal import use_backend
from lily_mlx.metal.check.texts import _batch
from lily_mlx.model import (
    ModelConfig,
    Sampling,
    arrays_of,
    choose_token,
    decode_step,
    empty_caches,
    prefill_chunk,
    with_arrays,
)
from lily_mlx.model.abstract import abstract_weights
from lily_mlx.model.choice import choose

# Primitives that change how an array is addressed and launch nothing.
VIEWS = {"Reshape", "Slice", "Squeeze", "ExpandDims", "Flatten", "Unflatten"}
DELTANET_LAYERS, ATTENTION_LAYERS = 30, 10


@pytest.fixture(scope="module")
def model():
    config = ModelConfig.from_dict(configuration())
    return config, abstract_weights(config), empty_caches(config)


def short_name(kernel: str) -> str:
    """The kernel's name without the digest of its text and its template values."""
    return re.sub(r"^lily_(\w+?)_[0-9a-f]{12}.*", r"\1", kernel)


MOST_INPUTS = 1_300  # of all launches of a step: each costs the host some time


def launches(graph: Graph) -> Counter[str]:
    """Launches by kernel, after checking that nothing but kernels computes."""
    names = {primitive.name for primitive in graph.primitives}
    assert names <= {"CustomKernel"} | VIEWS, f"primitives that are not kernels: {names - VIEWS}"
    kernels = Counter(short_name(p.kernel_name) for p in graph.primitives if p.is_kernel)
    print(
        *(f"{count:4} {name}" for name, count in sorted(kernels.items())),
        f"{kernels.total():4} in all",
        sep="\n",
    )
    return kernels


def test_decode_step_is_253_kernels(model):
    config, weights, caches = model
    inputs = [mx.zeros(1, mx.uint32), mx.zeros(1, mx.int32), mx.zeros(8), mx.zeros(1, mx.uint32)]
    state = (weights, caches)

    def step(token, position, parameters, seed, *arrays):
        new_weights, new_caches = with_arrays(state, arrays)
        output = decode_step(new_weights, config, token, position, new_caches, Sampling(parameters, seed))
        return [output.token, output.position, output.logits, *arrays_of(output.caches)]

    before = mx.get_active_memory()
    with use_backend("metal", tracing=True):
        graph = trace(step, [*inputs, *arrays_of(state)])
    kernels = launches(graph)
    assert kernels.total() == DELTANET_LAYERS * (3 + 3) + ATTENTION_LAYERS * (4 + 3) + 3 == 253
    count = sum(len(primitive.inputs) for primitive in graph.primitives if primitive.is_kernel)
    print(f"{count} inputs of kernels")
    assert count <= MOST_INPUTS
    assert mx.get_active_memory() - before < 2**20


@pytest.mark.parametrize(
    ("options", "end"),
    [
        pytest.param({"presence_penalty": 1.0}, ["head", "adjust", "select"], id="penalty"),
        pytest.param({"logit_bias": {3: 1.0}}, ["head", "adjust", "select"], id="bias"),
        pytest.param({"temp": 0.7, "top_p": 0.9}, ["head", "adjust", "draw"], id="top-p"),
        pytest.param(
            {"temp": 0.7, "top_p": 0.9, "min_p": 0.1, "top_k": 40, "xtc_probability": 0.5, "frequency_penalty": 1.0},
            ["head", "adjust", "draw"],
            id="everything",
        ),
    ],
)
def test_a_choice_with_controls_is_3_kernels(model, options, end):
    config, weights, _ = model
    sampling = make_sampling(seed=1, **options)
    like = (weights, sampling, sampling.recent_or_empty(None))
    inputs = [mx.zeros((1, config.hidden_size), mx.bfloat16), mx.zeros(1, mx.uint32), mx.zeros(1, mx.int32)]

    def end_of_step(x, tokens, position, *arrays):
        new_weights, new_sampling, recent = with_arrays(like, arrays)
        return arrays_of(choose(new_weights, config, x, tokens, position, new_sampling, recent))

    with use_backend("metal", tracing=True):
        kernels = launches(trace(end_of_step, [*inputs, *arrays_of(like)]))
    assert kernels == Counter(end)


@pytest.mark.parametrize("rows", [1, 7, 128, 2048])
@pytest.mark.parametrize("length", [0, 300], ids=["first-chunk", "later-chunk"])
def test_prefill_chunk_is_kernels_only(model, rows, length):
    config, weights, caches = model
    inputs = [mx.zeros(rows, mx.uint32), mx.zeros(8), mx.zeros(1, mx.uint32)]
    if length:
        caches = grown(caches, 512)
    state = (weights, caches)

    def chunk(tokens, parameters, seed, *arrays):
        new_weights, new_caches = with_arrays(state, arrays)
        last = mx.array([length + rows - 1], mx.int32)
        x, new_caches = prefill_chunk(new_weights, config, tokens, length, new_caches, last=last)
        output = choose_token(new_weights, config, x, length + rows, new_caches, Sampling(parameters, seed), last)
        return [output.token, output.position, *arrays_of(new_caches)]

    with use_backend("metal", tracing=True):
        kernels = launches(trace(chunk, [*inputs, *arrays_of(state)]))
    # Few rows: one launch for the router's norm and product, one for the routing, one between DeltaNet's projections.
    mixer, experts = (3, 1 + 1 + 3) if rows <= 64 else (5, 2 + 3 + 3)
    # The norm before a layer is part of the launch before it; the last layer works for the last row alone.
    assert kernels.total() <= DELTANET_LAYERS * (mixer + experts) + ATTENTION_LAYERS * (7 + experts) + 4


@pytest.mark.parametrize("sequences", [2, 24])
def test_batched_step_is_336_kernels(model, sequences):
    config, weights, _ = model
    with use_backend("metal", tracing=True):
        kernels = launches(trace(*_batch(config, weights, sequences, filtered=False)))
    assert kernels.total() == DELTANET_LAYERS * (3 + 5) + ATTENTION_LAYERS * (4 + 5) + 6 == 336


def grown(caches, capacity):
    """The same caches with room for `capacity` rows of keys and values."""

    def grow(array):
        is_cache = array.ndim == 3 and array.dtype == mx.bfloat16 and array.shape[1] != 128
        return mx.zeros((array.shape[0], capacity, array.shape[2]), array.dtype) if is_cache else array

    return with_arrays(caches, [grow(array) for array in arrays_of(caches)])
