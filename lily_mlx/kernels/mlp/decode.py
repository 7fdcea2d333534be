"""The first half of a gated MLP for one token."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear.checks import check_array, check_staged, weight_template
from lily_mlx.kernels.moe.policy import gate_up_shape
from lily_mlx.metal import Kernel

from .checks import check_pair

_GATE_UP = Kernel(
    name="mlp_gate_up_step",
    inputs=("x", "norm_weight", "gate", "up"),
    outputs=("hidden",),
    body="kernels/mlp/gate_up_step.metal",
    headers=(
        "metal/include/quantized.h",
        "kernels/linear/matvec.h",
        "kernels/linear/prologue.h",
        "kernels/moe/experts.h",
    ),
)


def gate_up_step(
    x: mx.array, norm_weight: mx.array, gate: QuantizedWeight, up: QuantizedWeight, eps: float
) -> mx.array:
    """RMSNorm, rounded to bfloat16, gate and up projections, and SwiGLU of one row.

    Args:
        x: bfloat16 [1, H], before the norm; H at most 8,192.
        norm_weight: bfloat16 [H], the norm's gain (`mx.fast.rms_norm`'s weight).
        gate, up: weights [I, H] in one format (config ``intermediate_size``; `Qwen3NextMLP` of mlx-lm).
        eps: added to the mean square (config ``rms_norm_eps``).

    Returns:
        hidden bfloat16 [1, I].

    Raises:
        ValueError: wrong shape, dtype or size, or formats that differ.
    """
    check_pair(gate, up)
    check_array("x", x, (1, gate.columns))
    check_array("norm_weight", norm_weight, (gate.columns,))
    check_staged(gate.columns)
    shape = gate_up_shape(gate.columns, gate.bits)
    threads = 32 * shape.simdgroups
    (hidden,) = _GATE_UP(
        [x, norm_weight, gate.packed, up.packed],
        template={
            **weight_template(gate),
            "ROWS": shape.rows,
            "LANES": shape.lanes,
            "SIMDGROUPS": shape.simdgroups,
            "EPS": float(eps),
        },
        grid=(threads * -(-gate.rows // shape.block), 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(1, gate.rows)],
        output_dtypes=[mx.bfloat16],
    )
    return hidden
