"""The linear kernels by their definition, in NumPy: the wrappers' names and arguments, on NumPy arrays.

Values that the model keeps in bfloat16 between two operations are rounded there; everything else is float64.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .weight import QuantizedWeight


def round_bfloat16(x: np.ndarray) -> np.ndarray:
    """Values rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), np.nan, rounded).astype(np.float64)


def dequantize(w: QuantizedWeight) -> np.ndarray:
    """Dense values [..., N, K] of a weight."""
    if not w.is_quantized:
        return np.array(w.values.astype(mx.float32)).astype(np.float64)
    words = np.array(w.weight)
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    digits = stream.reshape(*words.shape[:-1], w.columns, w.bits)
    codes = (digits * (1 << np.arange(w.bits))).sum(-1)
    scales, biases = (_expand(array, w.group_size) for array in (w.scales, w.biases))
    return np.asarray(codes * scales + biases)


def _expand(array: mx.array, group_size: int) -> np.ndarray:
    return np.repeat(np.array(array.astype(mx.float32)).astype(np.float64), group_size, axis=-1)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, rounded to bfloat16."""
    return round_bfloat16(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def norm_project(x: np.ndarray, norm_weight: np.ndarray, w: QuantizedWeight, eps: float) -> np.ndarray:
    """rms_norm(x) @ w.T."""
    return np.asarray(rms_norm(x, norm_weight, eps) @ dequantize(w).T)


def norm_matmul(
    x: np.ndarray, norm_weight: np.ndarray, w: QuantizedWeight, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """rms_norm(x) @ w.T and rms_norm(x)."""
    normed = rms_norm(x, norm_weight, eps)
    return np.asarray(normed @ dequantize(w).T), normed


def project_add(x: np.ndarray, w: QuantizedWeight, residual: np.ndarray) -> np.ndarray:
    """x @ w.T + residual."""
    return np.asarray(x @ dequantize(w).T + residual)


def gated_norm_project_add(
    y: np.ndarray,
    proj: np.ndarray,
    z_offset: int,
    norm_weight: np.ndarray,
    w: QuantizedWeight,
    residual: np.ndarray,
    eps: float,
) -> np.ndarray:
    """(norm(y) * norm_weight * silu(z)) @ w.T + residual, the norm over heads of norm_weight.size values."""
    heads = y.reshape(*y.shape[:-1], -1, norm_weight.size)
    normed = heads / np.sqrt(np.mean(heads * heads, axis=-1, keepdims=True) + eps) * norm_weight
    z = proj[..., z_offset : z_offset + y.shape[-1]]
    gated = normed.reshape(y.shape) * (z / (1.0 + np.exp(-z)))
    return np.asarray(round_bfloat16(gated) @ dequantize(w).T + residual)


def matmul(x: np.ndarray, w: QuantizedWeight, residual: np.ndarray | None = None) -> np.ndarray:
    """x @ w.T (+ residual)."""
    return np.asarray(x @ dequantize(w).T + (0.0 if residual is None else residual))


def embed(tokens: np.ndarray, w: QuantizedWeight) -> np.ndarray:
    """The tokens' rows of the table."""
    return np.asarray(dequantize(w)[tokens])
