"""What a layer remembers of one sequence. Immutable values: a snapshot is a reference."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from lily_mlx.kernels.attention import TAIL_ROWS, KVCache, empty_cache, merge_tail

from .config import ModelConfig


@dataclass(frozen=True)
class DeltaNetCache:
    """Memory of a Gated DeltaNet layer, of one size whatever the length of the sequence.

    Attributes:
        conv: bfloat16 [3, C], the convolution's last inputs, oldest first.
        state: float32 [Hv, Dv, Dk], the delta rule's state.
    """

    conv: mx.array
    state: mx.array


LayerCache = DeltaNetCache | KVCache


def empty_caches(config: ModelConfig) -> tuple[LayerCache, ...]:
    """The caches of a sequence without tokens, one for each layer."""
    shape = config.deltanet
    conv = mx.zeros((shape.conv_kernel - 1, shape.channels), mx.bfloat16)
    state = mx.zeros((shape.value_heads, shape.value_dim, shape.key_dim), mx.float32)
    deltanet, attention = DeltaNetCache(conv, state), empty_cache(config.attention)
    return tuple(attention if config.is_attention(i) else deltanet for i in range(config.layers))


def merge_tails(caches: tuple[LayerCache, ...], length: int) -> tuple[LayerCache, ...]:
    """Moves full tails of new rows into the large caches.

    Args:
        length: tokens of the sequence; the tails are full when it is a multiple of TAIL_ROWS.
    """
    if length % TAIL_ROWS:
        return caches
    return tuple(merge_tail(c, length) if isinstance(c, KVCache) else c for c in caches)
