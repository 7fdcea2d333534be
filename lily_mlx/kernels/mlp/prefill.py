"""The first half of a gated MLP for a chunk of rows."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear.checks import check_array, weight_template
from lily_mlx.kernels.moe import policy
from lily_mlx.metal import Kernel, matrix_engine

from .checks import check_pair

_GROUPED_HEADERS = (
    "metal/include/quantized.h",
    "metal/include/operands.h",
    "kernels/moe/experts.h",
    "kernels/moe/grouped.h",
)
_GATE_UP = Kernel(
    name="mlp_gate_up_chunk",
    inputs=("x", "gate", "up"),
    outputs=("hidden",),
    body="kernels/mlp/gate_up_chunk.metal",
    headers=(
        "metal/include/fragment.h",
        "metal/include/tile.h",
        "metal/include/simdgroup_engine.h",
        *_GROUPED_HEADERS,
    ),
)
_TENSOR_GATE_UP = Kernel(
    name="mlp_tensor_gate_up_chunk",
    inputs=_GATE_UP.inputs,
    outputs=_GATE_UP.outputs,
    body="kernels/mlp/gate_up_chunk.metal",
    headers=("metal/include/tensor_engine.h", *_GROUPED_HEADERS),
)
_TILED = {"simdgroup": _GATE_UP, "tensor": _TENSOR_GATE_UP}


def gate_up_chunk(x: mx.array, gate: QuantizedWeight, up: QuantizedWeight) -> mx.array:
    """Gate and up projections and SwiGLU of every row.

    The weights are rounded to bfloat16 after dequantisation, for the matrix instructions.

    Args:
        x: bfloat16 [M, H], normed.
        gate, up: weights [I, H] in one format.

    Returns:
        hidden bfloat16 [M, I].

    Raises:
        ValueError: wrong shape or dtype, or formats that differ.
    """
    check_pair(gate, up)
    check_array("x", x, (None, gate.columns))
    rows = x.shape[0]
    tile = policy.mlp_tile(rows, gate.columns)
    (hidden,) = _TILED[matrix_engine()](
        [x, gate.packed, up.packed],
        template=weight_template(gate) | tile.template(),
        grid=(tile.threads * -(-gate.rows // tile.columns), -(-rows // tile.rows), 1),
        threadgroup=(tile.threads, 1, 1),
        output_shapes=[(rows, gate.rows)],
        output_dtypes=[mx.bfloat16],
    )
    return hidden
