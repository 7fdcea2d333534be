"""The functions of `lily_mlx.kernels.linear` as MLX operations; arguments and results are described there."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight

__all__ = ["embed", "gated_norm_project_add", "matmul", "norm_matmul", "norm_project", "project_add", "rms_norm"]


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMSNorm of each row: [M, K] to bfloat16 [M, K]."""
    return normalised(x, weight, eps).astype(mx.bfloat16)


def norm_project(
    x: mx.array, norm_weight: mx.array, w: QuantizedWeight, eps: float, out_dtype: mx.Dtype = mx.bfloat16
) -> mx.array:
    """RMSNorm and projection of one row: [1, K] to [1, N]."""
    return product(rms_norm(x, norm_weight, eps), w).astype(out_dtype)


def project_add(x: mx.array, w: QuantizedWeight, residual: mx.array) -> mx.array:
    """Projection of one row plus the residual: [1, K] to bfloat16 [1, N]."""
    return matmul(x, w, residual)


def gated_norm_project_add(
    y: mx.array,
    proj: mx.array,
    z_offset: int,
    norm_weight: mx.array,
    w: QuantizedWeight,
    residual: mx.array,
    eps: float,
) -> mx.array:
    """Gated RMSNorm over each head, projection and residual: [1, K] to bfloat16 [1, N]."""
    z = proj[:, z_offset : z_offset + y.shape[1]]
    return matmul(gated_norm(y, z, norm_weight, eps), w, residual)


def matmul(
    x: mx.array, w: QuantizedWeight, residual: mx.array | None = None, out_dtype: mx.Dtype = mx.bfloat16
) -> mx.array:
    """x @ w.T, plus the residual: [M, K] to [M, N]."""
    out = product(x, w)
    if residual is not None:
        out = out + residual.astype(mx.float32)
    return out.astype(out_dtype)


def norm_matmul(
    x: mx.array, norm_weight: mx.array, w: QuantizedWeight, eps: float, out_dtype: mx.Dtype = mx.bfloat16
) -> tuple[mx.array, mx.array]:
    """RMSNorm of each row and a product of the normed rows: [M, K] to [M, N] and bfloat16 [M, K]."""
    normed = rms_norm(x, norm_weight, eps)
    return matmul(normed, w, out_dtype=out_dtype), normed


def embed(tokens: mx.array, w: QuantizedWeight) -> mx.array:
    """Rows of the table: uint32 [M] to bfloat16 [M, K]. An id beyond the table reads its last row."""
    rows = mx.minimum(tokens, mx.array(w.rows - 1, mx.uint32))
    if not w.is_quantized:
        return w.values[rows]
    scales, biases = (array[rows].astype(mx.float32) for array in (w.scales, w.biases))
    dense = mx.dequantize(w.weight[rows], scales, biases, group_size=w.group_size, bits=w.bits)
    return dense.astype(mx.bfloat16)


def product(x: mx.array, w: QuantizedWeight) -> mx.array:
    """x @ w.T in float32: [M, K] to [M, N]."""
    if not w.is_quantized:
        return x.astype(mx.float32) @ w.values.astype(mx.float32).T
    return mx.quantized_matmul(
        x.astype(mx.float32),
        w.weight,
        w.scales.astype(mx.float32),
        w.biases.astype(mx.float32),
        transpose=True,
        group_size=w.group_size,
        bits=w.bits,
    )


def normalised(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMSNorm over the last axis, float32."""
    x = x.astype(mx.float32)
    scale = mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True) + eps)
    return x * scale * weight.astype(mx.float32)


def gated_norm(y: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMSNorm over heads of `weight.size` values, times silu(z): [M, K] to bfloat16 [M, K]."""
    z = z.astype(mx.float32)
    normed = normalised(y.reshape(*y.shape[:-1], -1, weight.shape[0]), weight, eps)
    return (normed.reshape(y.shape) * z * mx.sigmoid(z)).astype(mx.bfloat16)
