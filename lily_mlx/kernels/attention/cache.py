"""Growing a key/value cache: new arrays for what changes, references to what does not."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.checks import check_array, check_rows
from lily_mlx.metal import Kernel

from .checks import check_cache, check_length, check_position
from .shape import TAIL_ROWS, AttentionShape, KVCache, capacity_for

_HEADERS = ("kernels/attention/rows.h",)
_APPEND_TAIL = Kernel(
    name="attention_append_tail",
    inputs=("tail_keys", "tail_values", "k", "proj", "position"),
    outputs=("tail_keys_out", "tail_values_out"),
    body="kernels/attention/append_tail.metal",
    headers=_HEADERS,
)
_APPEND_BLOCKS = Kernel(
    name="attention_append_blocks",
    inputs=("keys", "values", "tail_keys", "tail_values", "k", "proj", "position"),
    outputs=("keys_out", "values_out", "tail_keys_out", "tail_values_out"),
    body="kernels/attention/append_blocks.metal",
    headers=_HEADERS,
)
_MERGE_TAIL = Kernel(
    name="attention_merge_tail",
    inputs=("keys", "values", "tail_keys", "tail_values", "length"),
    outputs=("keys_out", "values_out"),
    body="kernels/attention/merge_tail.metal",
    headers=_HEADERS,
)
_THREADS = 256
_VALUES_PER_THREAD = 8


def merge_tail(cache: KVCache, length: int) -> KVCache:
    """Moves the full tail of a sequence of ``length`` tokens into new ``keys`` and ``values``.

    The host calls this after a decode step that filled the tail, before the next one.

    Args:
        cache: the cache, its tail full; it stays as it is.
        length: tokens of the sequence, a positive multiple of 128.

    Returns:
        The cache in the layout of KVCache with ``capacity_for(length)`` rows. One launch.

    Raises:
        ValueError: the tail is not full, or the cache cannot hold ``length`` tokens.
    """
    if length < TAIL_ROWS or length % TAIL_ROWS:
        raise ValueError(
            f"merge_tail: length {length} is not a positive multiple of {TAIL_ROWS}, so the tail is not full"
        )
    kv_heads, _, head_dim = cache.keys.shape
    check_cache("merge_tail", cache, kv_heads, head_dim)
    check_length("merge_tail", cache, length - TAIL_ROWS)
    capacity = capacity_for(length)
    keys, values = _MERGE_TAIL(
        [cache.keys, cache.values, cache.tail_keys, cache.tail_values, mx.array([length], mx.int32)],
        template={"D": head_dim, "TAIL": TAIL_ROWS, "CAPACITY": capacity},
        grid=(_threads(length, head_dim), kv_heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(kv_heads, capacity, head_dim)] * 2,
        output_dtypes=[mx.bfloat16] * 2,
    )
    return KVCache(keys, values, cache.tail_keys, cache.tail_values)


def append(
    cache: KVCache, k: mx.array, proj: mx.array, position: mx.array, length: int, shape: AttentionShape
) -> KVCache:
    """Appends the keys and values of a chunk.

    Args:
        cache: the cache of ``length`` tokens; it stays as it is.
        k: bfloat16 [M, Hkv, D] of `prepare`.
        proj: bfloat16 [M, P], the joined projection (its value columns).
        position: int32 [1], ``length`` on the device.
        length: tokens before the chunk.
        shape: the layer's shape.

    Returns:
        The cache of ``length + M`` tokens. Its ``keys`` and ``values`` are the old arrays unless the chunk completes
        a block of 128 rows; then they are new, with ``capacity_for`` their rows. One launch.

    Raises:
        ValueError: wrong shape or dtype, or the cache cannot hold ``length`` tokens.
    """
    check_cache("append", cache, shape.kv_heads, shape.head_dim)
    check_length("append", cache, length)
    tokens = check_rows("append", "k", k, (shape.kv_heads, shape.head_dim), mx.bfloat16)
    check_array("append", "proj", proj, (tokens, shape.projection_width), mx.bfloat16)
    check_position("append", position)
    template = {
        "HKV": shape.kv_heads,
        "D": shape.head_dim,
        "P": shape.projection_width,
        "VALUES": shape.value_offset,
        "TAIL": TAIL_ROWS,
    }
    tail = (shape.kv_heads, TAIL_ROWS, shape.head_dim)
    total = length + tokens
    if total // TAIL_ROWS == length // TAIL_ROWS:
        tail_keys, tail_values = _APPEND_TAIL(
            [cache.tail_keys, cache.tail_values, k, proj, position],
            template=template,
            grid=(_threads(TAIL_ROWS, shape.head_dim), shape.kv_heads, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[tail] * 2,
            output_dtypes=[mx.bfloat16] * 2,
        )
        return KVCache(cache.keys, cache.values, tail_keys, tail_values)
    capacity = capacity_for(total - total % TAIL_ROWS)
    main = (shape.kv_heads, capacity, shape.head_dim)
    keys, values, tail_keys, tail_values = _APPEND_BLOCKS(
        [cache.keys, cache.values, cache.tail_keys, cache.tail_values, k, proj, position],
        template=template | {"CAPACITY": capacity},
        # By the capacity, so that a compiled chunk fits every length of it.
        grid=(_threads(capacity + TAIL_ROWS, shape.head_dim), shape.kv_heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[main, main, tail, tail],
        output_dtypes=[mx.bfloat16] * 4,
    )
    return KVCache(keys, values, tail_keys, tail_values)


def _threads(rows: int, head_dim: int) -> int:
    """Threads for ``rows`` rows in pieces of 16 bytes, in whole threadgroups."""
    return -(-rows * head_dim // (_VALUES_PER_THREAD * _THREADS)) * _THREADS
