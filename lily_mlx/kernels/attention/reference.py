"""The definition of gated grouped-query attention: plain NumPy, float64, no tricks.

Arrays have the shapes of the kernels' wrappers. A sequence's keys and values are plain arrays
[n, Hkv, D] here: how the cache is cut into blocks is no part of the definition. The source is
``Qwen3NextAttention`` in mlx_lm.
"""

from __future__ import annotations

import numpy as np

from .shape import AttentionShape


def rope(x: np.ndarray, positions: np.ndarray, shape: AttentionShape) -> np.ndarray:
    """Rotates the first R dimensions of each head: x [M, heads, D], positions [M]."""
    half = shape.rotary_dim // 2
    frequencies = shape.rope_theta ** (-2.0 * np.arange(half) / max(shape.rotary_dim, 1))
    angles = np.asarray(positions, np.float64)[:, None, None] * frequencies
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    turned_first = first * np.cos(angles) - second * np.sin(angles)
    turned_second = second * np.cos(angles) + first * np.sin(angles)
    return np.concatenate([turned_first, turned_second, rest], axis=-1)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def split(
    proj: np.ndarray, shape: AttentionShape
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The joined projection [M, P] as queries and gates [M, Hq, D], keys and values [M, Hkv, D]."""
    rows, dim = proj.shape[0], shape.head_dim
    heads = proj[:, : shape.key_offset].reshape(rows, shape.query_heads, 2, dim)
    keys = proj[:, shape.key_offset : shape.value_offset].reshape(rows, shape.kv_heads, dim)
    values = proj[:, shape.value_offset :].reshape(rows, shape.kv_heads, dim)
    return heads[:, :, 0], heads[:, :, 1], keys, values


def prepare(
    proj: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    position: int,
    shape: AttentionShape,
    eps: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Normalised and rotated queries [M, Hq, D] and keys [M, Hkv, D] of tokens from `position` on."""
    queries, _, keys, _ = split(proj, shape)
    positions = position + np.arange(proj.shape[0])
    return (
        rope(rms_norm(queries, q_norm, eps), positions, shape),
        rope(rms_norm(keys, k_norm, eps), positions, shape),
    )


def attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    position: int,
    proj: np.ndarray,
    shape: AttentionShape,
) -> np.ndarray:
    """Causal attention of M tokens from `position` on, times the sigmoid of the output gate: [M, Hq * D].

    Args:
        q: [M, Hq, D]. keys, values: [position + M, Hkv, D]. proj: [M, P], whose gates are used.
    """
    _, gates, _, _ = split(proj, shape)
    out = np.empty_like(q)
    for row in range(q.shape[0]):
        visible = position + row + 1
        for head in range(shape.query_heads):
            kv = head // shape.group
            scores = keys[:visible, kv] @ q[row, head] / np.sqrt(shape.head_dim)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values[:visible, kv] / weights.sum()
    return (out / (1 + np.exp(-gates))).reshape(q.shape[0], -1)
