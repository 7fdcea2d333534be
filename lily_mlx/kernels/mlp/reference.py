"""The first half of a gated MLP by its definition, in NumPy: the wrappers' names and arguments, on NumPy arrays.

Source: "GLU Variants Improve Transformer" (Shazeer, 2020); config fields ``intermediate_size``, ``rms_norm_eps``.
"""

from __future__ import annotations

import numpy as np

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear.reference import dequantize, rms_norm


def gate_up_step(
    x: np.ndarray, norm_weight: np.ndarray, gate: QuantizedWeight, up: QuantizedWeight, eps: float
) -> np.ndarray:
    """silu(xn @ gate.T) * (xn @ up.T), xn the normed row."""
    return gate_up_chunk(rms_norm(x, norm_weight, eps), gate, up)


def gate_up_chunk(x: np.ndarray, gate: QuantizedWeight, up: QuantizedWeight) -> np.ndarray:
    """silu(x @ gate.T) * (x @ up.T)."""
    gated = x @ dequantize(gate).T
    return np.asarray(gated / (1.0 + np.exp(-gated)) * (x @ dequantize(up).T))
