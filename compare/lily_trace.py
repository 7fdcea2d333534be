"""Our decode step and prefill chunk at full size, traced without weights on any machine."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from lily_mlx.kernels.attention import KVCache, capacity_for
from lily_mlx.metal import use_backend
from lily_mlx.model import (
    LayerCache,
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

from .full_size import LAYERS, configuration
from .graph import Graph, trace


def caches_for(config: ModelConfig, context: int) -> tuple[LayerCache, ...]:
    """Caches with room for `context` tokens, as zeros that nothing computes."""
    capacity = capacity_for(context - context % 128)

    def grown(cache: LayerCache) -> LayerCache:
        if not isinstance(cache, KVCache):
            return cache
        heads, _, dim = cache.keys.shape
        main = mx.zeros((heads, capacity, dim), mx.bfloat16)
        return replace(cache, keys=main, values=main)

    return tuple(grown(cache) for cache in empty_caches(config))


def decode_graph(context: int, layers: int = LAYERS) -> Graph:
    """The graph of one decode step after `context` tokens, as MLX gets it on Metal."""
    config = ModelConfig.from_dict(configuration(layers))
    state = (abstract_weights(config), caches_for(config, context))

    def step(token: mx.array, position: mx.array, parameters: mx.array, seed: mx.array, *arrays: mx.array):
        weights, caches = with_arrays(state, arrays)
        output = decode_step(weights, config, token, position, caches, Sampling(parameters, seed))
        return [output.token, output.position, output.logits, *arrays_of(output.caches)]

    inputs = [mx.zeros(1, mx.uint32), mx.zeros(1, mx.int32), mx.zeros(8), mx.zeros(1, mx.uint32)]
    with use_backend("metal", tracing=True):
        return trace(step, [*inputs, *arrays_of(state)])


def chunk_graph(rows: int, context: int, layers: int = LAYERS) -> Graph:
    """The graph of a chunk of `rows` tokens after `context`, to the choice of the next token."""
    config = ModelConfig.from_dict(configuration(layers))
    state = (abstract_weights(config), caches_for(config, context))

    def chunk(tokens: mx.array, parameters: mx.array, seed: mx.array, *arrays: mx.array):
        weights, caches = with_arrays(state, arrays)
        last = mx.array([context + rows - 1], mx.int32)
        x, caches = prefill_chunk(weights, config, tokens, context, caches, last=last)
        output = choose_token(weights, config, x, context + rows, caches, Sampling(parameters, seed), last)
        return [output.token, output.position, output.logits, *arrays_of(output.caches)]

    inputs = [mx.zeros(rows, mx.uint32), mx.zeros(8), mx.zeros(1, mx.uint32)]
    with use_backend("metal", tracing=True):
        return trace(chunk, [*inputs, *arrays_of(state)])
