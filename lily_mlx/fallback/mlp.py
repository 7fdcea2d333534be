"""The functions of `lily_mlx.kernels.mlp` as MLX operations; arguments and results are described there."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight

from .linear import product, rms_norm

__all__ = ["gate_up_chunk", "gate_up_step"]


def gate_up_step(
    x: mx.array, norm_weight: mx.array, gate: QuantizedWeight, up: QuantizedWeight, eps: float
) -> mx.array:
    """RMSNorm, gate and up projections and SwiGLU of one row: [1, H] to bfloat16 [1, I]."""
    return gate_up_chunk(rms_norm(x, norm_weight, eps), gate, up)


def gate_up_chunk(x: mx.array, gate: QuantizedWeight, up: QuantizedWeight) -> mx.array:
    """Gate and up projections and SwiGLU of every row: [M, H] to bfloat16 [M, I]."""
    gated = product(x, gate)
    return (gated * mx.sigmoid(gated) * product(x, up)).astype(mx.bfloat16)
