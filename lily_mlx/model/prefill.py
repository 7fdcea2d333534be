"""One prefill chunk as a list of kernel calls."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels import attention, deltanet
from lily_mlx.kernels.attention import KVCache
from lily_mlx.kernels.linear import embed, matmul, rms_norm
from lily_mlx.kernels.moe import combine, grouped_down, grouped_gate_up, route

from .cache import DeltaNetCache, LayerCache
from .choice import Sampling, choose
from .config import ModelConfig
from .decode import StepOutput
from .weights import AttentionWeights, DeltaNetWeights, ModelWeights, MoEWeights


def prefill_chunk(
    weights: ModelWeights,
    config: ModelConfig,
    tokens: mx.array,
    length: int,
    caches: tuple[LayerCache, ...],
    position: mx.array | None = None,
    submit_every: int = 0,
) -> tuple[mx.array, tuple[LayerCache, ...]]:
    """Feeds a chunk of tokens.

    Args:
        tokens: uint32 [M], M >= 1.
        length: tokens before the chunk, which the caches hold.
        caches: the layers' memory of them.
        position: int32 [1], ``length`` on the device; None: made here.
        submit_every: after so many layers the device gets their work while the host prepares the next; 0: never.

    Returns:
        The residual stream after the last layer, bfloat16 [M, H], and the new caches.
    """
    if position is None:
        position = mx.array([length], mx.int32)
    x = embed(tokens, weights.embedding)
    new_caches: list[LayerCache] = []
    for index, (layer, cache) in enumerate(zip(weights.layers, caches, strict=True)):
        if submit_every and index and index % submit_every == 0:
            mx.async_eval(x)
        if isinstance(layer.mixer, DeltaNetWeights):
            assert isinstance(cache, DeltaNetCache)
            x, cache = deltanet_chunk(layer.mixer, config, x, cache)
        else:
            assert isinstance(cache, KVCache)
            x, cache = attention_chunk(layer.mixer, config, x, position, length, cache)
        x = moe_chunk(layer.moe, config, x)
        new_caches.append(cache)
    return x, tuple(new_caches)


def deltanet_chunk(
    weights: DeltaNetWeights, config: ModelConfig, x: mx.array, cache: DeltaNetCache
) -> tuple[mx.array, DeltaNetCache]:
    """Gated DeltaNet with its residual: x bfloat16 [M, H] to the same."""
    shape, eps = config.deltanet, config.norm_eps
    proj = matmul(rms_norm(x, weights.in_norm, eps), weights.in_proj)
    q, k, v, decay, beta, conv = deltanet.prepare(proj, cache.conv, weights.conv, weights.a_log, weights.dt_bias, shape)
    y, state = deltanet.scan(q, k, v, decay, beta, cache.state, shape)
    y = deltanet.gated_norm(y, proj, weights.out_norm, shape, eps)
    return matmul(y, weights.out_proj, residual=x), DeltaNetCache(conv, state)


def attention_chunk(
    weights: AttentionWeights,
    config: ModelConfig,
    x: mx.array,
    position: mx.array,
    length: int,
    cache: KVCache,
) -> tuple[mx.array, KVCache]:
    """Gated attention with its residual: x bfloat16 [M, H] to the same."""
    shape, eps = config.attention, config.norm_eps
    proj = matmul(rms_norm(x, weights.in_norm, eps), weights.in_proj)
    q, k = attention.prepare(proj, weights.q_norm, weights.k_norm, position, shape, eps)
    cache = attention.append(cache, k, proj, position, length, shape)
    y = attention.prefill_attention(q, cache, position, proj, shape)
    return matmul(y, weights.out_proj, residual=x), cache


def moe_chunk(weights: MoEWeights, config: ModelConfig, x: mx.array) -> mx.array:
    """Mixture of experts with its residual: x bfloat16 [M, H] to the same."""
    normed = rms_norm(x, weights.in_norm, config.norm_eps)
    logits = matmul(normed, weights.router, out_dtype=mx.float32)
    routing = route(logits, config.top_k, config.normalise_scores)
    hidden = grouped_gate_up(normed, routing, weights.experts)
    outputs = grouped_down(hidden, routing, weights.experts)
    return combine(outputs, routing, x)


def choose_token(
    weights: ModelWeights,
    config: ModelConfig,
    x: mx.array,
    length: int,
    caches: tuple[LayerCache, ...],
    sampling: Sampling,
    position: mx.array | None = None,
    tokens: mx.array | None = None,
    recent: mx.array | None = None,
) -> StepOutput:
    """Chooses the token after a chunk from its last row.

    Args:
        x: bfloat16 [M, H], from `prefill_chunk`.
        length: tokens that the caches hold, the chunk's included.
        caches: handed on as they are.
        sampling: how the token is chosen.
        position: int32 [1], of the last row, ``length`` - 1; None: made here.
        tokens: uint32 [M], the last tokens fed, for a sampling with filters or penalties.
        recent: the tokens before them, where the sampling has penalties.
    """
    if position is None:
        position = mx.array([length - 1], mx.int32)
    choice = choose(weights, config, x[-1:], tokens, position, sampling, recent)
    return StepOutput(choice.token, choice.position, choice.logits, caches, choice.recent)


def all_logits(weights: ModelWeights, config: ModelConfig, x: mx.array) -> mx.array:
    """Logits of every row of a chunk: x bfloat16 [M, H] to float32 [M, V]."""
    return matmul(rms_norm(x, weights.norm, config.norm_eps), weights.head, out_dtype=mx.float32)
