"""One decode step as a list of kernel calls.

A DeltaNet mixer takes 3, an attention mixer 4, experts 3, a gated MLP 2, and the ends of the step 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from lily_mlx.kernels import attention, deltanet
from lily_mlx.kernels.attention import KVCache
from lily_mlx.kernels.linear import embed, gated_norm_project_add, norm_project, project_add
from lily_mlx.kernels.mlp import gate_up_step
from lily_mlx.kernels.moe import experts_down, experts_gate_up

from .cache import DeltaNetCache, LayerCache
from .choice import Sampling, choose
from .config import ModelConfig
from .weights import AttentionWeights, DeltaNetWeights, MLPWeights, ModelWeights, MoEWeights


@dataclass(frozen=True)
class StepOutput:
    """What a step or a chunk hands on.

    Attributes:
        token: uint32 [1], the chosen token, which the next step reads.
        position: int32 [1], where that token stands: the tokens that the caches hold.
        logits: float32 [1, V], from which it was chosen.
        caches: one for each layer.
        recent: uint32 [R], the tokens that penalties look back on; None if the sampling has none.
    """

    token: mx.array
    position: mx.array
    logits: mx.array
    caches: tuple[LayerCache, ...]
    recent: mx.array | None = None


def decode_step(
    weights: ModelWeights,
    config: ModelConfig,
    token: mx.array,
    position: mx.array,
    caches: tuple[LayerCache, ...],
    sampling: Sampling,
    recent: mx.array | None = None,
) -> StepOutput:
    """Feeds one token and chooses the next.

    Args:
        token: uint32 [1].
        position: int32 [1], where `token` stands, counted from 0.
        caches: the layers' memory of the tokens before it.
        sampling: how the next token is chosen.
        recent: the tokens before it, where the sampling has penalties.

    Returns:
        The next token and the new caches. Where the new length is a multiple of TAIL_ROWS the tails are full,
        and `merge_tails` must follow before another step.
    """
    x = embed(token, weights.embedding)
    new_caches: list[LayerCache] = []
    for layer, cache in zip(weights.layers, caches, strict=True):
        if isinstance(layer.mixer, DeltaNetWeights):
            assert isinstance(cache, DeltaNetCache)
            x, cache = deltanet_step(layer.mixer, config, x, cache)
        else:
            assert isinstance(cache, KVCache)
            x, cache = attention_step(layer.mixer, config, x, position, cache)
        x = mlp_step(layer.mlp, config, x)
        new_caches.append(cache)
    choice = choose(weights, config, x, token, position, sampling, recent)
    return StepOutput(choice.token, choice.position, choice.logits, tuple(new_caches), choice.recent)


def deltanet_step(
    weights: DeltaNetWeights, config: ModelConfig, x: mx.array, cache: DeltaNetCache
) -> tuple[mx.array, DeltaNetCache]:
    """Gated DeltaNet with its residual: x bfloat16 [1, H] to the same. 3 launches, or 5 where b and a stand apart."""
    shape, eps = config.deltanet, config.norm_eps
    proj = norm_project(x, weights.in_norm, weights.in_proj, eps)
    if weights.gate_proj is not None:
        proj = mx.concatenate([proj, norm_project(x, weights.in_norm, weights.gate_proj, eps)], axis=1)
    y, conv, state = deltanet.step(proj, cache.conv, cache.state, weights.conv, weights.a_log, weights.dt_bias, shape)
    x = gated_norm_project_add(y, proj, shape.z_offset, weights.out_norm, weights.out_proj, x, eps)
    return x, DeltaNetCache(conv, state)


def attention_step(
    weights: AttentionWeights, config: ModelConfig, x: mx.array, position: mx.array, cache: KVCache
) -> tuple[mx.array, KVCache]:
    """Gated attention with its residual: x bfloat16 [1, H] to the same. 4 launches."""
    shape, eps = config.attention, config.norm_eps
    proj = norm_project(x, weights.in_norm, weights.in_proj, eps)
    y, cache = attention.step(proj, weights.q_norm, weights.k_norm, position, cache, shape, eps)
    return project_add(y, weights.out_proj, x), cache


def mlp_step(weights: MoEWeights | MLPWeights, config: ModelConfig, x: mx.array) -> mx.array:
    """A layer's experts or gated MLP with its residual: x bfloat16 [1, H] to the same. 3 or 2 launches."""
    if isinstance(weights, MoEWeights):
        return moe_step(weights, config, x)
    hidden = gate_up_step(x, weights.in_norm, weights.gate, weights.up, config.norm_eps)
    return project_add(hidden, weights.down, x)


def moe_step(weights: MoEWeights, config: ModelConfig, x: mx.array) -> mx.array:
    """Mixture of experts with its residual: x bfloat16 [1, H] to the same. 3 launches."""
    eps = config.norm_eps
    logits = norm_project(x, weights.in_norm, weights.router, eps, out_dtype=mx.float32)
    hidden, routing = experts_gate_up(
        x, weights.in_norm, logits, weights.experts, config.top_k, eps, config.normalise_scores
    )
    return experts_down(hidden, routing, weights.experts, x)
