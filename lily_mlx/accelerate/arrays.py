"""What a layer remembers, in mlx_lm's layout of arrays and in the kernels'. Both directions keep every value."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.attention import TAIL_ROWS, KVCache
from lily_mlx.kernels.attention.shape import capacity_for
from lily_mlx.model import DeltaNetCache


def deltanet_cache(conv: mx.array, state: mx.array) -> DeltaNetCache:
    """One sequence of a Gated DeltaNet layer: conv [3, C] and state [Hv, Dv, Dk], of any float dtype."""
    return DeltaNetCache(mx.contiguous(conv.astype(mx.bfloat16)), mx.contiguous(state.astype(mx.float32)))


def attention_cache(keys: mx.array, values: mx.array) -> KVCache:
    """One sequence of an attention layer: keys and values [Hkv, n, D], of any float dtype, n >= 0."""
    main_keys, tail_keys = _split(keys.astype(mx.bfloat16))
    main_values, tail_values = _split(values.astype(mx.bfloat16))
    return KVCache(main_keys, main_values, tail_keys, tail_values)


def attention_arrays(cache: KVCache, length: int) -> tuple[mx.array, mx.array]:
    """Keys and values of a sequence of `length` tokens, bfloat16 [Hkv, length, D] each.

    Where the length is a multiple of TAIL_ROWS they are views, else copies.
    """
    return _join(cache.keys, cache.tail_keys, length), _join(cache.values, cache.tail_values, length)


def _split(rows: mx.array) -> tuple[mx.array, mx.array]:
    heads, length, width = rows.shape
    in_main = length - length % TAIL_ROWS
    return (
        _padded(rows[:, :in_main], (heads, capacity_for(in_main), width)),
        _padded(rows[:, in_main:], (heads, TAIL_ROWS, width)),
    )


def _padded(rows: mx.array, shape: tuple[int, int, int]) -> mx.array:
    return mx.pad(rows, ((0, 0), (0, shape[1] - rows.shape[1]), (0, 0)))


def _join(main: mx.array, tail: mx.array, length: int) -> mx.array:
    in_tail = length % TAIL_ROWS
    rows = main[:, : length - in_tail]
    return mx.concatenate([rows, tail[:, :in_tail]], axis=1) if in_tail else rows
