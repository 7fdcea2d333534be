"""The functions of `lily_mlx.kernels.attention` as MLX operations; arguments and results are described there."""

from __future__ import annotations

import math
from dataclasses import replace

import mlx.core as mx

from lily_mlx.kernels.attention import TAIL_ROWS, YOUNG_PAGE, AttentionShape, KVCache, PagedCache, Work, capacity_for
from lily_mlx.kernels.attention.rope import turns_per_position

from .linear import normalised

__all__ = ["append", "batch_step", "merge_tail", "prefill_attention", "prepare", "step"]

_MOST_SCORES = 1 << 26  # float32 values that one block of query rows may take: 256 MB


def step(
    proj: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    position: mx.array,
    cache: KVCache,
    shape: AttentionShape,
    eps: float,
    plan: object = None,
) -> tuple[mx.array, KVCache]:
    """Gated attention of one token, and the cache with its key and value. `plan` has no effect."""
    q, k = prepare(proj, q_norm, k_norm, position, shape, eps)
    values = proj[:, shape.value_offset :].reshape(shape.kv_heads, 1, shape.head_dim)
    is_new = (mx.arange(TAIL_ROWS) == position % TAIL_ROWS)[None, :, None]
    tail_keys = mx.where(is_new, k.reshape(shape.kv_heads, 1, shape.head_dim), cache.tail_keys)
    tail_values = mx.where(is_new, values, cache.tail_values)
    cache = KVCache(cache.keys, cache.values, tail_keys, tail_values)
    return _attend(q, cache, position, position - position % TAIL_ROWS, proj, shape), cache


def batch_step(
    proj: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    work: Work,
    cache: PagedCache,
    shape: AttentionShape,
    eps: float,
    plan: object = None,
) -> tuple[mx.array, PagedCache]:
    """Gated attention of one token of each sequence, one after another. `plan` has no effect."""
    outs, tails = [], []
    most = work.items.shape[0]
    for row in range(proj.shape[0]):
        place = work.places[row]
        # The sequence's pages in order; what follows them belongs to others and lies after its rows.
        index = mx.minimum(place[1] + mx.arange(most, dtype=mx.int32), most - 1)
        own = work.items[index, 1]
        is_young = (own == YOUNG_PAGE).reshape(-1, 1, 1, 1)
        keys, values = (
            mx.where(is_young, young[row], pool[mx.maximum(own, 0)])
            .swapaxes(0, 1)
            .reshape(shape.kv_heads, -1, shape.head_dim)
            for pool, young in ((cache.keys, cache.young_keys), (cache.values, cache.young_values))
        )
        alone = KVCache(keys, values, cache.tail_keys[row], cache.tail_values[row])
        out, after = step(proj[row : row + 1], q_norm, k_norm, place[:1], alone, shape, eps)
        outs.append(out)
        tails.append((after.tail_keys, after.tail_values))
    tail_keys, tail_values = (mx.stack(parts) for parts in zip(*tails, strict=True))
    return mx.concatenate(outs), replace(cache, tail_keys=tail_keys, tail_values=tail_values)


def prepare(
    proj: mx.array, q_norm: mx.array, k_norm: mx.array, position: mx.array, shape: AttentionShape, eps: float
) -> tuple[mx.array, mx.array]:
    """Queries and keys of a chunk after RMSNorm and rotary embedding."""
    tokens = proj.shape[0]
    queries = proj[:, : shape.key_offset].reshape(tokens, shape.query_heads, 2, shape.head_dim)[:, :, 0]
    keys = proj[:, shape.key_offset : shape.value_offset].reshape(tokens, shape.kv_heads, shape.head_dim)
    positions = position + mx.arange(tokens, dtype=mx.int32)
    return tuple(  # type: ignore[return-value]
        _rope(normalised(x, weight, eps), positions, shape).astype(mx.bfloat16)
        for x, weight in ((queries, q_norm), (keys, k_norm))
    )


def append(
    cache: KVCache, k: mx.array, proj: mx.array, position: mx.array, length: int, shape: AttentionShape
) -> KVCache:
    """The cache with a chunk's keys and values behind those of `length` tokens.

    Only the sizes of the results follow from `length`, rows are placed by `position`, so that a traced chunk is right
    at other lengths of the same sizes.
    """
    values = proj[:, shape.value_offset :].reshape(-1, shape.kv_heads, shape.head_dim)
    tokens = k.shape[0]
    total = length + tokens
    before, end = position - position % TAIL_ROWS, position + tokens
    in_tail = mx.arange(TAIL_ROWS, dtype=mx.int32)

    def rows(wanted: mx.array, main: mx.array, tail: mx.array, new: mx.array) -> mx.array:
        """Rows of the sequence by their positions; those after its end are undefined."""
        old = mx.where(wanted < before, wanted, cache.capacity + wanted - before)
        index = mx.where(wanted < position, old, cache.capacity + TAIL_ROWS + mx.minimum(wanted - position, tokens - 1))
        return mx.take(mx.concatenate([main, tail, new.swapaxes(0, 1)], axis=1), index, axis=1)

    keys_in, values_in = (cache.keys, cache.tail_keys, k), (cache.values, cache.tail_values, values)
    if total // TAIL_ROWS == length // TAIL_ROWS:
        wanted = before + in_tail
        return KVCache(cache.keys, cache.values, rows(wanted, *keys_in), rows(wanted, *values_in))
    main, tail = mx.arange(capacity_for(total - total % TAIL_ROWS), dtype=mx.int32), end - end % TAIL_ROWS + in_tail
    return KVCache(rows(main, *keys_in), rows(main, *values_in), rows(tail, *keys_in), rows(tail, *values_in))


def merge_tail(cache: KVCache, length: int) -> KVCache:
    """The cache with its full tail moved to `keys` and `values`."""
    before, capacity = length - TAIL_ROWS, capacity_for(length)
    keys, values = (
        _padded(mx.concatenate([main[:, :before], tail], axis=1), capacity)
        for main, tail in ((cache.keys, cache.tail_keys), (cache.values, cache.tail_values))
    )
    return KVCache(keys, values, cache.tail_keys, cache.tail_values)


def prefill_attention(
    q: mx.array,
    cache: KVCache,
    position: mx.array,
    proj: mx.array,
    shape: AttentionShape,
    plan: object = None,
) -> mx.array:
    """Gated causal attention of a chunk that is in the cache already. `plan` has no effect."""
    total = position + q.shape[0]
    return _attend(q, cache, position, total - total % TAIL_ROWS, proj, shape)


def _attend(
    q: mx.array, cache: KVCache, position: mx.array, before: mx.array, proj: mx.array, shape: AttentionShape
) -> mx.array:
    """Attention of query rows [M, Hq, D] at `position` and after it, times the sigmoid of their gates.

    Args:
        before: int32 [1], rows that count in the cache's large arrays; those of the tail follow.
    """
    tokens, capacity = q.shape[0], cache.capacity
    main = mx.arange(capacity, dtype=mx.int32)
    where = mx.concatenate(
        [
            mx.where(main < before, main, mx.array(2**31 - 1, mx.int32)),
            before + mx.arange(TAIL_ROWS, dtype=mx.int32),
        ]
    )  # the position of each row; rows that no query may see come last
    seen = (where < position + tokens)[None, :, None]

    def joined(rows: mx.array, tail: mx.array) -> mx.array:
        # Unused rows may hold NaN, which a weight of zero does not silence.
        return mx.where(seen, mx.concatenate([rows, tail], axis=1), mx.array(0, mx.bfloat16)).astype(mx.float32)

    keys, values = joined(cache.keys, cache.tail_keys).swapaxes(1, 2), joined(cache.values, cache.tail_values)
    block = max(1, _MOST_SCORES // (shape.query_heads * where.size))
    rows = []
    for start in range(0, tokens, block):
        queries = q[start : start + block].astype(mx.float32) / math.sqrt(shape.head_dim)
        count = queries.shape[0]
        grouped = queries.reshape(count, shape.kv_heads, shape.group, -1).swapaxes(0, 1)
        scores = (grouped.reshape(shape.kv_heads, count * shape.group, -1) @ keys).reshape(
            shape.kv_heads, count, shape.group, -1
        )
        last = position + start + mx.arange(count, dtype=mx.int32)
        visible = (where[None] <= last[:, None])[None, :, None]
        weights = mx.softmax(mx.where(visible, scores, mx.array(-math.inf)), axis=-1)
        out = weights.reshape(shape.kv_heads, count * shape.group, -1) @ values
        rows.append(out.reshape(shape.kv_heads, count, shape.group, -1).swapaxes(0, 1).reshape(count, -1))
    gates = proj[:, : shape.key_offset].reshape(tokens, shape.query_heads, 2, shape.head_dim)[:, :, 1]
    gated = mx.concatenate(rows) * mx.sigmoid(gates.astype(mx.float32)).reshape(tokens, -1)
    return gated.astype(mx.bfloat16)


def _rope(x: mx.array, positions: mx.array, shape: AttentionShape) -> mx.array:
    """Rotates the first R dimensions of x, float32 [M, heads, D], by exact angles."""
    half = shape.rotary_dim // 2
    if not half:
        return x
    turns = turns_per_position(shape.rotary_dim, shape.rope_theta)[:half].astype(mx.uint64)
    # 64-bit fixed point: whole turns drop out of the product, and its upper half is the rest.
    product = positions.astype(mx.uint64)[:, None] * (turns[:, 0] * 2**32 + turns[:, 1])
    part = (product >> 32).astype(mx.uint32).view(mx.int32)
    angles = part.astype(mx.float32)[:, None] * (2.0 * math.pi / 2**32)
    cosine, sine = mx.cos(angles), mx.sin(angles)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return mx.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)


def _padded(rows: mx.array, count: int) -> mx.array:
    """Rows [Hkv, n, D] with zero rows added up to `count`."""
    return mx.contiguous(mx.pad(rows, [(0, 0), (0, count - rows.shape[1]), (0, 0)]))
