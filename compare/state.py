"""Random state of a long context, the same in both engines, so that decode needs no long prefill."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from lily_mlx.engine import SequenceState
from lily_mlx.kernels.attention import TAIL_ROWS, AttentionShape, KVCache, capacity_for
from lily_mlx.model import ModelConfig
from lily_mlx.model.cache import DeltaNetCache

KEY_DEVIATION = 1.0
VALUE_DEVIATION = 1.0
STATE_DEVIATION = 0.02


def keys_and_values(layer: int, length: int, kv_heads: int, head_dim: int, seed: int) -> tuple[mx.array, mx.array]:
    """Keys and values of one attention layer, bfloat16 [Hkv, length, D]."""
    shape = (kv_heads, length, head_dim)
    keys, values = (mx.random.normal(shape, dtype=mx.bfloat16, key=mx.random.key(seed + 4 * layer + i)) for i in (0, 1))
    return KEY_DEVIATION * keys, VALUE_DEVIATION * values


def deltanet_state(
    layer: int, channels: int, heads: int, value_dim: int, key_dim: int, seed: int
) -> tuple[mx.array, mx.array]:
    """Convolution rows, bfloat16 [3, C], and the delta rule's state, float32 [Hv, Dv, Dk]."""
    conv_key, state_key = (mx.random.key(seed + 4 * layer + i) for i in (2, 3))
    conv = mx.random.normal((3, channels), dtype=mx.bfloat16, key=conv_key)
    return conv, STATE_DEVIATION * mx.random.normal((heads, value_dim, key_dim), key=state_key)


def lily_state(config: ModelConfig, length: int, seed: int) -> SequenceState:
    """A sequence of `length` tokens in our engine, with token 1 to be fed next."""
    caches: list[DeltaNetCache | KVCache] = []
    for layer in range(config.layers):
        if config.is_attention(layer):
            caches.append(_kv_cache(config.attention, layer, length, seed))
        else:
            s = config.deltanet
            conv, state = deltanet_state(layer, s.channels, s.value_heads, s.value_dim, s.key_dim, seed)
            caches.append(DeltaNetCache(conv, state))
        mx.eval([vars(caches[-1])])
    return SequenceState(
        length, tuple(caches), mx.array([1], mx.uint32), mx.array([length], mx.int32), mx.zeros((1, 1))
    )


def _kv_cache(shape: AttentionShape, layer: int, length: int, seed: int) -> KVCache:
    keys, values = keys_and_values(layer, length, shape.kv_heads, shape.head_dim, seed)
    in_main = length - length % TAIL_ROWS
    capacity = capacity_for(in_main)

    def main(rows: mx.array) -> mx.array:
        return mx.pad(rows[:, :in_main], [(0, 0), (0, capacity - in_main), (0, 0)])

    def tail(rows: mx.array) -> mx.array:
        return mx.pad(rows[:, in_main:], [(0, 0), (0, TAIL_ROWS - length % TAIL_ROWS), (0, 0)])

    return KVCache(main(keys), main(values), tail(keys), tail(values))


def fill_mlx_lm_cache(caches: list[Any], model: Any, length: int, seed: int) -> None:
    """The same sequence in mlx-lm's caches."""
    args = model.language_model.args
    channels = 2 * args.linear_num_key_heads * args.linear_key_head_dim
    channels += args.linear_num_value_heads * args.linear_value_head_dim
    for layer, cache in enumerate(caches):
        if hasattr(cache, "keys"):
            keys, values = keys_and_values(layer, length, args.num_key_value_heads, args.head_dim, seed)
            cache.keys, cache.values, cache.offset = keys[None], values[None], length
            mx.eval(cache.keys, cache.values)
        else:
            conv, state = deltanet_state(
                layer,
                channels,
                args.linear_num_value_heads,
                args.linear_value_head_dim,
                args.linear_key_head_dim,
                seed,
            )
            cache[0], cache[1] = conv[None], state[None]
            mx.eval(cache[0], cache[1])
