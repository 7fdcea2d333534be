"""One decode step of several sequences as a list of kernel calls: 8 or 9 for a layer, for up to 64 sequences.

What is not a sequence's own goes through the kernels of short chunks, so that each weight is read once for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

from lily_mlx.kernels import attention, deltanet
from lily_mlx.kernels.attention import TAIL_ROWS, PagedCache, Work
from lily_mlx.kernels.linear import matmul
from lily_mlx.kernels.sampling import RowControls, choose_rows

from .cache import DeltaNetCache
from .config import ModelConfig
from .prefill import all_logits, deltanet_projection, embed_chunk, in_norm, mlp_chunk, mlp_chunk_norm
from .weights import AttentionWeights, DeltaNetWeights, ModelWeights


@dataclass(frozen=True)
class Tails:
    """The last rows of B sequences in one attention layer, see `PagedCache`.

    Attributes:
        keys, values: bfloat16 [B, Hkv, TAIL_ROWS, D].
    """

    keys: mx.array
    values: mx.array


@dataclass(frozen=True)
class Pool:
    """The pages of one attention layer, see `PagedCache`.

    Attributes:
        keys, values: bfloat16 [pages, Hkv, TAIL_ROWS, D].
        young_keys, young_values: bfloat16 [B, Hkv, TAIL_ROWS, D].
    """

    keys: mx.array
    values: mx.array
    young_keys: mx.array
    young_values: mx.array


RowMemory = DeltaNetCache | Tails  # what a step renews; DeltaNetCache with an axis of sequences before its own


@dataclass(frozen=True)
class BatchOutput:
    """What a step hands on.

    Attributes:
        tokens: uint32 [B], the chosen tokens, which the next step reads.
        logits: float32 [B, V], from which they were chosen, after biases and penalties.
        recent: uint32 [B, R], the tokens that penalties look back on.
        memories: one for each layer.
    """

    tokens: mx.array
    logits: mx.array
    recent: mx.array
    memories: tuple[RowMemory, ...]


def empty_memories(config: ModelConfig, rows: int) -> tuple[RowMemory, ...]:
    """The memories of sequences without tokens, one for each layer; no two share an array."""
    shape, heads = config.deltanet, config.attention
    window = (rows, shape.conv_kernel - 1, shape.channels)
    state = (rows, shape.value_heads, shape.value_dim, shape.key_dim)
    tail = (rows, heads.kv_heads, TAIL_ROWS, heads.head_dim)
    return tuple(
        Tails(mx.zeros(tail, mx.bfloat16), mx.zeros(tail, mx.bfloat16))
        if config.is_attention(i)
        else DeltaNetCache(mx.zeros(window, mx.bfloat16), mx.zeros(state, mx.float32))
        for i in range(config.layers)
    )


def batch_step(
    weights: ModelWeights,
    config: ModelConfig,
    tokens: mx.array,
    positions: mx.array,
    work: Work,
    pools: Iterable[Pool],
    memories: tuple[RowMemory, ...],
    recent: mx.array,
    controls: RowControls,
) -> BatchOutput:
    """Feeds one token of each sequence and chooses the next ones.

    A sequence's numbers do not depend on the others.

    Args:
        tokens: uint32 [B], B >= 2.
        positions: int32 [B], where they stand, counted from 0: `work.places` has them too.
        work: which pages belong to which sequence.
        pools: the pages of each attention layer.
        memories: what the layers remember beside the pages.
        recent, controls: see `choose_rows`.

    Returns:
        The next tokens and memories. Where a sequence's new length is a multiple of TAIL_ROWS its tail is full and must
        become a page before another step.
    """
    pool = iter(pools)
    x, normed = embed_chunk(weights, config, tokens)
    renewed: list[RowMemory] = []
    for index, (layer, memory) in enumerate(zip(weights.layers, memories, strict=True)):
        if isinstance(layer.mixer, DeltaNetWeights):
            assert isinstance(memory, DeltaNetCache)
            x, memory = deltanet_rows(layer.mixer, config, x, normed, memory)
        else:
            assert isinstance(memory, Tails)
            x, memory = attention_rows(layer.mixer, config, x, normed, work, next(pool), memory)
        renewed.append(memory)
        if index + 1 < len(weights.layers):
            x, normed = mlp_chunk_norm(layer.mlp, config, x, in_norm(weights.layers[index + 1]))
        else:
            x = mlp_chunk(layer.mlp, config, x)
    chosen, logits, recent = choose_rows(all_logits(weights, config, x), tokens, positions, recent, controls)
    return BatchOutput(chosen, logits, recent, tuple(renewed))


def deltanet_rows(
    weights: DeltaNetWeights, config: ModelConfig, x: mx.array, normed: mx.array, memory: DeltaNetCache
) -> tuple[mx.array, DeltaNetCache]:
    """Gated DeltaNet of one token of each sequence, with its residual: x bfloat16 [B, H] to the same. 3 launches."""
    proj = deltanet_projection(weights, normed)
    y, conv, state = deltanet.batch_step(
        proj,
        memory.conv,
        memory.state,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.out_norm,
        config.deltanet,
        config.norm_eps,
    )
    return matmul(y, weights.out_proj, residual=x), DeltaNetCache(conv, state)


def attention_rows(
    weights: AttentionWeights,
    config: ModelConfig,
    x: mx.array,
    normed: mx.array,
    work: Work,
    pool: Pool,
    tails: Tails,
) -> tuple[mx.array, Tails]:
    """Gated attention of one token of each sequence, with its residual: x bfloat16 [B, H] to the same. 4 launches."""
    proj = matmul(normed, weights.in_proj)
    cache = PagedCache(pool.keys, pool.values, pool.young_keys, pool.young_values, tails.keys, tails.values)
    y, cache = attention.batch_step(
        proj, weights.q_norm, weights.k_norm, work, cache, config.attention, config.norm_eps
    )
    return matmul(y, weights.out_proj, residual=x), Tails(cache.tail_keys, cache.tail_values)
