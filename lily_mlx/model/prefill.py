"""One prefill chunk as a list of kernel calls."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels import attention, deltanet
from lily_mlx.kernels.attention import KVCache
from lily_mlx.kernels.deltanet import policy as deltanet_policy
from lily_mlx.kernels.linear import embed, gated_norm_project_add, matmul, norm_matmul, project_add, rms_norm
from lily_mlx.kernels.mlp import gate_up_chunk
from lily_mlx.kernels.moe import Routing, combine, combine_norm, grouped_down, grouped_gate_up, route

from .cache import DeltaNetCache, LayerCache
from .choice import Sampling, choose
from .config import ModelConfig
from .decode import StepOutput, mlp_step
from .weights import AttentionWeights, DeltaNetWeights, LayerWeights, MLPWeights, ModelWeights, MoEWeights

MOST_PARTS_AHEAD = 2  # parts of a chunk's layers that wait for the device while the host prepares another


def prefill_chunk(
    weights: ModelWeights,
    config: ModelConfig,
    tokens: mx.array,
    length: int,
    caches: tuple[LayerCache, ...],
    position: mx.array | None = None,
    last: mx.array | None = None,
    submit_every: int = 0,
) -> tuple[mx.array, tuple[LayerCache, ...]]:
    """Feeds a chunk of tokens.

    Args:
        tokens: uint32 [M], M >= 1.
        length: tokens before the chunk, which the caches hold.
        caches: the layers' memory of them.
        position: int32 [1], ``length`` on the device; None: made here.
        last: int32 [1], position of the last row, where only that row is wanted: the last layer then computes for it
            alone what no cache keeps. None: all rows.
        submit_every: after so many layers the device gets their work while the host prepares the next; 0: never. The
            host waits where it is more than `MOST_PARTS_AHEAD` parts of this chunk ahead, so that memory holds what few
            layers need.

    Returns:
        The residual stream after the last layer, bfloat16 [M, H], or [1, H] with ``last``; and the new caches.
    """
    if position is None:
        position = mx.array([length], mx.int32)
    x, normed = embed_chunk(weights, config, tokens)
    new_caches: tuple[LayerCache, ...] = ()
    submitted: list[mx.array] = []
    for layers in layer_parts(len(weights.layers), submit_every):
        if layers.start:
            mx.async_eval(x)
            submitted.append(x)
        if len(submitted) > MOST_PARTS_AHEAD:
            mx.eval(submitted.pop(0))
        own = caches[layers.start : layers.stop]
        x, normed, own = prefill_layers(weights, config, layers, x, normed, length, own, position, last)
        new_caches += own
    return x, new_caches


def layer_parts(layers: int, most: int) -> list[range]:
    """The layers in order, at most ``most`` in a part; 0: in one part."""
    most = most or layers
    return [range(first, min(first + most, layers)) for first in range(0, layers, most)]


def embed_chunk(weights: ModelWeights, config: ModelConfig, tokens: mx.array) -> tuple[mx.array, mx.array]:
    """The embeddings of tokens, uint32 [M], and the norm that the first layer starts with: bfloat16 [M, H] both."""
    x = embed(tokens, weights.embedding)
    return x, rms_norm(x, in_norm(weights.layers[0]), config.norm_eps)


def prefill_layers(
    weights: ModelWeights,
    config: ModelConfig,
    layers: range,
    x: mx.array,
    normed: mx.array,
    length: int,
    caches: tuple[LayerCache, ...],
    position: mx.array,
    last: mx.array | None = None,
) -> tuple[mx.array, mx.array, tuple[LayerCache, ...]]:
    """Feeds a chunk through some of the layers.

    Args:
        layers: their indices, consecutive.
        x: bfloat16 [M, H], the residual stream before them.
        normed: bfloat16 [M, H], the norm of x that the first of them starts with.
        length, position, last: see `prefill_chunk`.
        caches: of these layers.

    Returns:
        x and normed for the layer after them (``normed`` is x itself after the last one), and the new caches.
    """
    new_caches: list[LayerCache] = []
    for index, cache in zip(layers, caches, strict=True):
        layer = weights.layers[index]
        is_last = index + 1 == len(weights.layers)
        row = last if is_last else None
        if isinstance(layer.mixer, DeltaNetWeights):
            assert isinstance(cache, DeltaNetCache)
            x, cache = deltanet_chunk(layer.mixer, config, x, cache, normed, last_only=row is not None)
        else:
            assert isinstance(cache, KVCache)
            x, cache = attention_chunk(layer.mixer, config, x, position, length, cache, normed, row)
        new_caches.append(cache)
        if row is not None:
            normed = x = mlp_step(layer.mlp, config, x)
        elif is_last:
            normed = x = mlp_chunk(layer.mlp, config, x)
        else:
            x, normed = mlp_chunk_norm(layer.mlp, config, x, in_norm(weights.layers[index + 1]))
    return x, normed, tuple(new_caches)


def in_norm(layer: LayerWeights) -> mx.array:
    """The weight of the norm that a layer starts with."""
    return layer.mixer.in_norm


def deltanet_chunk(
    weights: DeltaNetWeights,
    config: ModelConfig,
    x: mx.array,
    cache: DeltaNetCache,
    normed: mx.array | None = None,
    last_only: bool = False,
) -> tuple[mx.array, DeltaNetCache]:
    """Gated DeltaNet with its residual: x bfloat16 [M, H] to the same, or to its last row.

    ``normed`` is the layer's norm of x where it is known already. 3 launches for few rows, else 5; one less for the
    last row of many, one more for the norm and two more where b and a stand apart.
    """
    shape, eps = config.deltanet, config.norm_eps
    proj = deltanet_projection(weights, rms_norm(x, weights.in_norm, eps) if normed is None else normed)
    if deltanet_policy.is_short(x.shape[0]):
        y, conv, state = deltanet.short_chunk(
            proj,
            cache.conv,
            cache.state,
            weights.conv,
            weights.a_log,
            weights.dt_bias,
            weights.out_norm,
            shape,
            eps,
        )
        new_cache = DeltaNetCache(conv, state)
        if last_only:
            return project_add(y[-1:], weights.out_proj, x[-1:]), new_cache
        return matmul(y, weights.out_proj, residual=x), new_cache
    q, k, v, decay, beta, conv = deltanet.prepare(proj, cache.conv, weights.conv, weights.a_log, weights.dt_bias, shape)
    y, state = deltanet.scan(q, k, v, decay, beta, cache.state, shape)
    new_cache = DeltaNetCache(conv, state)
    if last_only:
        rows = y[-1:], proj[-1:]
        return gated_norm_project_add(*rows, shape.z_offset, weights.out_norm, weights.out_proj, x[-1:], eps), new_cache
    y = deltanet.gated_norm(y, proj, weights.out_norm, shape, eps)
    return matmul(y, weights.out_proj, residual=x), new_cache


def deltanet_projection(weights: DeltaNetWeights, normed: mx.array) -> mx.array:
    """The joined projection of normed rows: bfloat16 [M, H] to [M, P]."""
    proj = matmul(normed, weights.in_proj)
    if weights.gate_proj is None:
        return proj
    return mx.concatenate([proj, matmul(normed, weights.gate_proj)], axis=1)


def attention_chunk(
    weights: AttentionWeights,
    config: ModelConfig,
    x: mx.array,
    position: mx.array,
    length: int,
    cache: KVCache,
    normed: mx.array | None = None,
    last: mx.array | None = None,
) -> tuple[mx.array, KVCache]:
    """Gated attention with its residual: x bfloat16 [M, H] to the same, or to its last row.

    ``normed`` is the layer's norm of x where it is known already; ``last`` is the position of the last row, int32 [1],
    where only that is wanted.
    """
    shape, eps = config.attention, config.norm_eps
    proj = matmul(rms_norm(x, weights.in_norm, eps) if normed is None else normed, weights.in_proj)
    q, k = attention.prepare(proj, weights.q_norm, weights.k_norm, position, shape, eps)
    cache = attention.append(cache, k, proj, position, length, shape)
    if last is not None:
        y = attention.prefill_attention(q[-1:], cache, last, proj[-1:], shape)
        return project_add(y, weights.out_proj, x[-1:]), cache
    y = attention.prefill_attention(q, cache, position, proj, shape)
    return matmul(y, weights.out_proj, residual=x), cache


def mlp_chunk(weights: MoEWeights | MLPWeights, config: ModelConfig, x: mx.array) -> mx.array:
    """A layer's experts or gated MLP with its residual: x bfloat16 [M, H] to the same."""
    if isinstance(weights, MoEWeights):
        return moe_chunk(weights, config, x)
    hidden = gate_up_chunk(rms_norm(x, weights.in_norm, config.norm_eps), weights.gate, weights.up)
    return matmul(hidden, weights.down, residual=x)


def mlp_chunk_norm(
    weights: MoEWeights | MLPWeights, config: ModelConfig, x: mx.array, next_norm: mx.array
) -> tuple[mx.array, mx.array]:
    """`mlp_chunk`, and the norm of its result that the next layer starts with."""
    if isinstance(weights, MoEWeights):
        return moe_chunk_norm(weights, config, x, next_norm)
    x = mlp_chunk(weights, config, x)
    return x, rms_norm(x, next_norm, config.norm_eps)


def moe_chunk(weights: MoEWeights, config: ModelConfig, x: mx.array) -> mx.array:
    """Mixture of experts with its residual: x bfloat16 [M, H] to the same."""
    outputs, routing = _expert_outputs(weights, config, x)
    return combine(outputs, routing, x)


def moe_chunk_norm(
    weights: MoEWeights, config: ModelConfig, x: mx.array, next_norm: mx.array
) -> tuple[mx.array, mx.array]:
    """`moe_chunk`, and the norm of its result that the next layer starts with."""
    outputs, routing = _expert_outputs(weights, config, x)
    return combine_norm(outputs, routing, x, next_norm, config.norm_eps)


def _expert_outputs(weights: MoEWeights, config: ModelConfig, x: mx.array) -> tuple[mx.array, Routing]:
    logits, normed = norm_matmul(x, weights.in_norm, weights.router, config.norm_eps, out_dtype=mx.float32)
    routing = route(logits, config.top_k, config.normalise_scores)
    hidden = grouped_gate_up(normed, routing, weights.experts)
    return grouped_down(hidden, routing, weights.experts), routing


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
