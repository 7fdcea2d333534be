"""Checks of the wrappers' arguments, made before any launch."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.checks import check_array

from .shape import TAIL_ROWS, AttentionShape, KVCache


def check_position(where: str, position: mx.array) -> None:
    """Checks the position of the first row: int32 [1], on the device."""
    check_array(where, "position", position, (1,), mx.int32)


def check_norms(where: str, q_norm: mx.array, k_norm: mx.array, shape: AttentionShape) -> None:
    """Checks the two norm weights."""
    check_array(where, "q_norm", q_norm, (shape.head_dim,), mx.bfloat16)
    check_array(where, "k_norm", k_norm, (shape.head_dim,), mx.bfloat16)


def check_cache(where: str, cache: KVCache, kv_heads: int, head_dim: int) -> None:
    """Checks the four arrays of a cache against each other and the layer."""
    capacity = cache.keys.shape[1] if cache.keys.ndim == 3 else 0
    if capacity < TAIL_ROWS:
        raise ValueError(
            f"{where}: cache.keys must be [{kv_heads}, capacity >= {TAIL_ROWS}, {head_dim}], "
            f"got {list(cache.keys.shape)}"
        )
    for name, rows in (
        ("keys", capacity),
        ("values", capacity),
        ("tail_keys", TAIL_ROWS),
        ("tail_values", TAIL_ROWS),
    ):
        check_array(where, f"cache.{name}", getattr(cache, name), (kv_heads, rows, head_dim), mx.bfloat16)


def check_length(where: str, cache: KVCache, length: int) -> None:
    """Checks that a cache can hold a sequence of ``length`` tokens in the layout of KVCache."""
    if length < 0 or length - length % TAIL_ROWS > cache.capacity:
        raise ValueError(f"{where}: length {length} does not fit a cache of capacity {cache.capacity}")
