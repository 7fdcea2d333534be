"""A call of a model as mlx_lm makes it: token ids and caches in, logits of every position out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from lily_mlx.engine import DEFAULT_CHUNK_SIZE, SequenceState, make_sampling
from lily_mlx.model import LayerCache, Model, ModelConfig, Sampling, arrays_of, merge_tails, prefill_chunk
from lily_mlx.model.prefill import all_logits

from .cache import ArraysCache, BatchKVCache, KVCache, adopt


def make_cache(config: ModelConfig) -> list[Any]:
    """Empty caches, one for each layer, for any number of sequences."""
    return [KVCache() if config.is_attention(i) else ArraysCache() for i in range(config.layers)]


def forward(model: Model, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
    """Feeds tokens to the sequences of a batch, one sequence after the other.

    One token of a sequence that has some already goes through the kernels of a decode step, more tokens through
    those of a prefill chunk.

    Args:
        model: the weights and shapes.
        inputs: integers [B, L]; the caches know which columns are padding.
        cache: one cache for each layer, of this package or of mlx_lm, changed in place; None keeps nothing.

    Returns:
        float32 [B, L, V]; zeros where a column is padding. MLX computes only the rows that are used, except on the
        `cpu` backend, which computes all.

    Raises:
        ValueError: `inputs` or `cache` do not fit the model or each other.
    """
    config = model.config
    if inputs.ndim != 2 or not mx.issubdtype(inputs.dtype, mx.integer):
        raise ValueError(f"the tokens are {inputs.dtype} {list(inputs.shape)}: give integers [batch, length]")
    batch, count = inputs.shape
    if count > 1:
        _check_range(inputs, config.vocab_size)
    if cache is None:
        cache = make_cache(config)
    adopt(cache, [config.is_attention(i) for i in range(config.layers)])
    lengths = _lengths(cache, batch)
    rows, states = [], []
    for row in range(batch):
        start, end = cache[0].window.columns(row, count)
        state = _state(config, cache, row, lengths[row])
        logits, state = _feed(model, inputs[row, start:end].astype(mx.uint32), state)
        rows.append(mx.pad(logits, ((start, count - end), (0, 0))) if end - start < count else logits)
        states.append(state)
    _store(cache, states)
    for layer in cache:
        layer.window.advance(count)
    return mx.stack(rows) if batch > 1 else rows[0][None]


def sequence_state(config: ModelConfig, cache: list[Any]) -> SequenceState:
    """The state of the one sequence that a prompt cache holds, for `Engine`.

    Raises:
        ValueError: the cache does not fit the model, or it holds several sequences.
    """
    adopt(cache, [config.is_attention(i) for i in range(config.layers)])
    return _state(config, cache, 0, _lengths(cache, 1)[0])


def store_sequence(cache: list[Any], state: SequenceState) -> None:
    """Makes a prompt cache, which `sequence_state` has read, hold another state."""
    _store(cache, [state])


def _check_range(inputs: mx.array, vocab_size: int) -> None:
    low, high = int(mx.min(inputs).item()), int(mx.max(inputs).item())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is not in the model's vocabulary of {vocab_size} tokens")


def _lengths(cache: Sequence[Any], batch: int) -> list[int]:
    """Tokens of each sequence, after a check that all layers hold as many sequences as the call has."""
    for layer in cache:
        if layer.rows and len(layer.rows) != batch:
            raise ValueError(f"the prompt cache holds {len(layer.rows)} sequences, but the call has {batch}")
    attention = [layer.lengths or [0] * batch for layer in cache if isinstance(layer, (KVCache, BatchKVCache))]
    if any(lengths != attention[0] for lengths in attention):
        raise ValueError(f"the attention layers of the prompt cache differ in length: {attention}")
    lengths: list[int] = attention[0] if attention else [0] * batch
    for layer in cache:
        empty = [state is None for state in layer.rows or [None] * batch]
        if attention and empty != [length == 0 for length in lengths]:
            raise ValueError(
                f"the prompt cache has {lengths} tokens in its attention layers, but other layers say otherwise: "
                "trim or reset all layers, or none"
            )
    return lengths


def _state(config: ModelConfig, cache: Sequence[Any], row: int, length: int) -> SequenceState:
    if not length:
        return SequenceState.empty(config)
    caches: tuple[LayerCache, ...] = tuple(layer.rows[row] for layer in cache)
    return SequenceState(length, caches, None, mx.array([length], mx.int32), None)


def _store(cache: list[Any], states: Sequence[SequenceState]) -> None:
    for i, layer in enumerate(cache):
        layer.rows = [state.caches[i] if state.length else None for state in states]
        if isinstance(layer, (KVCache, BatchKVCache)):
            layer.lengths = [state.length for state in states]
            if isinstance(layer, KVCache) and len(set(layer.lengths)) > 1:
                cache[i] = BatchKVCache(layer.rows, layer.lengths)
                cache[i].window = layer.window


@functools.cache
def _greedy() -> Sampling:
    """A step always chooses a token; here the caller does that again, from the logits."""
    return make_sampling()


def _feed(model: Model, tokens: mx.array, state: SequenceState) -> tuple[mx.array, SequenceState]:
    """Feeds the tokens, uint32 [L], of one sequence; returns logits float32 [L, V] and the new state."""
    if not tokens.size:
        return mx.zeros((0, model.config.vocab_size), mx.float32), state
    if tokens.size == 1 and state.length:
        output = model.step(tokens, state.position, state.caches, _greedy())
        length = state.length + 1
        caches = merge_tails(output.caches, length)
        return output.logits, SequenceState(length, caches, None, output.position, None)
    caches, length, rows = state.caches, state.length, []
    for start in range(0, tokens.size, DEFAULT_CHUNK_SIZE):
        if start:
            mx.eval(arrays_of(caches))
        x, caches = prefill_chunk(
            model.weights, model.config, tokens[start : start + DEFAULT_CHUNK_SIZE], length, caches
        )
        length += x.shape[0]
        rows.append(all_logits(model.weights, model.config, x))
    logits = mx.concatenate(rows) if len(rows) > 1 else rows[0]
    return logits, SequenceState(length, caches, None, mx.array([length], mx.int32), None)
