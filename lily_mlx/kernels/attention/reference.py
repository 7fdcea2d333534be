"""Gated grouped-query attention by its definition, in numpy and float64: what the kernels are tested against.

The functions have the names and arguments of the package's, with numpy arrays for MLX's. The definition is that of
``Qwen3NextAttention`` in mlx_lm (attention with an output gate, RMSNorm of each query and key head and a partial rotary
embedding of the first dimensions, paired with a distance of R / 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .shape import TAIL_ROWS, AttentionShape, capacity_for


class KVCache(NamedTuple):
    """The fields of the package's KVCache, as numpy arrays."""

    keys: np.ndarray
    values: np.ndarray
    tail_keys: np.ndarray
    tail_values: np.ndarray


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def rope(x: np.ndarray, positions: np.ndarray, shape: AttentionShape) -> np.ndarray:
    """Rotates the first R dimensions of x [M, heads, D] by the angles positions[m] * theta**(-2 i / R)."""
    half = shape.rotary_dim // 2
    frequencies = shape.rope_theta ** (-2.0 * np.arange(half) / max(shape.rotary_dim, 1))
    angles = (positions[:, None] * frequencies)[:, None, :]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    turned = (
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
    )
    return np.concatenate([*turned, rest], axis=-1)


def split_projection(proj: np.ndarray, shape: AttentionShape) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries and gates [M, Hq, D], keys and values [M, Hkv, D] of the joined projection [M, P]."""
    tokens = proj.shape[0]
    queries = proj[:, : shape.key_offset].reshape(tokens, shape.query_heads, 2, shape.head_dim)
    keys = proj[:, shape.key_offset : shape.value_offset].reshape(tokens, shape.kv_heads, shape.head_dim)
    values = proj[:, shape.value_offset :].reshape(tokens, shape.kv_heads, shape.head_dim)
    return queries[:, :, 0], queries[:, :, 1], keys, values


def rows(cache: KVCache, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [Hkv, length, D] of a sequence, joined from both levels of the cache."""
    tail = length % TAIL_ROWS
    keys = np.concatenate([cache.keys[:, : length - tail], cache.tail_keys[:, :tail]], axis=1)
    values = np.concatenate([cache.values[:, : length - tail], cache.tail_values[:, :tail]], axis=1)
    return keys, values


def make_cache(keys: np.ndarray, values: np.ndarray) -> KVCache:
    """The cache of a sequence with these keys and values [Hkv, n, D]; undefined rows hold NaN."""
    kv_heads, length, head_dim = keys.shape
    tail = length % TAIL_ROWS
    main_shape = (kv_heads, capacity_for(length - tail), head_dim)
    tail_shape = (kv_heads, TAIL_ROWS, head_dim)
    cache = KVCache(*(np.full(s, np.nan) for s in (main_shape, main_shape, tail_shape, tail_shape)))
    cache.keys[:, : length - tail], cache.tail_keys[:, :tail] = (
        keys[:, : length - tail],
        keys[:, length - tail :],
    )
    cache.values[:, : length - tail], cache.tail_values[:, :tail] = (
        values[:, : length - tail],
        values[:, length - tail :],
    )
    return cache


def attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    position: int,
    gate: np.ndarray,
    shape: AttentionShape,
) -> np.ndarray:
    """sigmoid(gate) * softmax(q k^T / sqrt(D)) v for q [M, Hq, D]; row m sees the keys up to ``position`` + m."""
    out = np.empty(q.shape)
    for token in range(q.shape[0]):
        seen = position + token + 1
        for head in range(shape.query_heads):
            kv_head = head // shape.group
            scores = keys[kv_head, :seen] @ q[token, head] / np.sqrt(shape.head_dim)
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ values[kv_head, :seen] / weights.sum()
    return np.asarray(out / (1.0 + np.exp(-gate))).reshape(q.shape[0], -1)


def prepare(
    proj: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    position: np.ndarray,
    shape: AttentionShape,
    eps: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Queries [M, Hq, D] and keys [M, Hkv, D] after RMSNorm and rotary embedding."""
    queries, _, keys, _ = split_projection(proj, shape)
    positions = int(position[0]) + np.arange(proj.shape[0])
    return rope(rms_norm(queries, q_norm, eps), positions, shape), rope(rms_norm(keys, k_norm, eps), positions, shape)


def step(
    proj: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    position: np.ndarray,
    cache: KVCache,
    shape: AttentionShape,
    eps: float,
) -> tuple[np.ndarray, KVCache]:
    """Gated attention [1, Hq * D] of one token, and the cache with its key and value in the tail."""
    q, k = prepare(proj, q_norm, k_norm, position, shape, eps)
    _, gate, _, v = split_projection(proj, shape)
    row = int(position[0]) % TAIL_ROWS
    before = int(position[0]) - row
    tail_keys, tail_values = cache.tail_keys.copy(), cache.tail_values.copy()
    tail_keys[:, row] = k[0]
    tail_values[:, row] = v[0]
    keys = np.concatenate([cache.keys[:, :before], tail_keys[:, : row + 1]], axis=1)
    values = np.concatenate([cache.values[:, :before], tail_values[:, : row + 1]], axis=1)
    out = attend(q, keys, values, int(position[0]), gate, shape)
    return out, KVCache(cache.keys, cache.values, tail_keys, tail_values)


class PagedCache(NamedTuple):
    """The fields of the package's PagedCache, as numpy arrays."""

    keys: np.ndarray
    values: np.ndarray
    young_keys: np.ndarray
    young_values: np.ndarray
    tail_keys: np.ndarray
    tail_values: np.ndarray


def batch_step(
    proj: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    positions: Sequence[int],
    pages: Sequence[Sequence[int]],
    cache: PagedCache,
    shape: AttentionShape,
    eps: float,
) -> tuple[np.ndarray, PagedCache]:
    """`step` of each sequence: [B, Hq * D], and the cache with the new tails."""
    outs, tail_keys, tail_values = [], cache.tail_keys.copy(), cache.tail_values.copy()
    for row, (position, own) in enumerate(zip(positions, pages, strict=True)):
        keys, values = (
            np.concatenate([young[row] if page < 0 else pool[page] for page in own] or [pool[0, :, :0]], axis=1)
            for pool, young in zip(cache[:2], cache[2:4], strict=True)
        )
        alone = KVCache(keys, values, cache.tail_keys[row], cache.tail_values[row])
        at = np.array([position])
        out, after = step(proj[row : row + 1], q_norm, k_norm, at, alone, shape, eps)
        outs.append(out)
        tail_keys[row], tail_values[row] = after.tail_keys, after.tail_values
    return np.concatenate(outs), cache._replace(tail_keys=tail_keys, tail_values=tail_values)


def merge_tail(cache: KVCache, length: int) -> KVCache:
    """The cache with its full tail moved to ``keys`` and ``values``."""
    before = length - TAIL_ROWS
    return make_cache(
        np.concatenate([cache.keys[:, :before], cache.tail_keys], axis=1),
        np.concatenate([cache.values[:, :before], cache.tail_values], axis=1),
    )


def append(
    cache: KVCache, k: np.ndarray, proj: np.ndarray, position: np.ndarray, length: int, shape: AttentionShape
) -> KVCache:
    """The cache of ``length`` tokens with a chunk's keys and values behind them."""
    keys, values = rows(cache, length)
    new_values = split_projection(proj, shape)[3]
    return make_cache(
        np.concatenate([keys, k.transpose(1, 0, 2)], axis=1),
        np.concatenate([values, new_values.transpose(1, 0, 2)], axis=1),
    )


def prefill_attention(
    q: np.ndarray, cache: KVCache, position: np.ndarray, proj: np.ndarray, shape: AttentionShape
) -> np.ndarray:
    """Gated causal attention [M, Hq * D] of a chunk that is in the cache already."""
    keys, values = rows(cache, int(position[0]) + q.shape[0])
    return attend(q, keys, values, int(position[0]), split_projection(proj, shape)[1], shape)
