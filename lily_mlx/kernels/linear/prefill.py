"""Norm, product, both in one, and embedding for a chunk of rows."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.metal import Kernel, matrix_engine

from .checks import check_array, check_matrix, check_output_dtype, weight_template
from .policy import ShortPlan, matmul_plan, norm_matmul_plan, norm_simdgroups
from .weight import QuantizedWeight

_RMS_NORM = Kernel(
    name="rms_norm",
    inputs=("x", "weight"),
    outputs=("out",),
    body="kernels/linear/rms_norm.metal",
    headers=("metal/include/quantized.h", "metal/include/reduce.h"),
)
_MATMUL = Kernel(
    name="matmul",
    inputs=("x", "weight", "residual"),
    outputs=("out",),
    body="kernels/linear/matmul.metal",
    headers=(
        "metal/include/fragment.h",
        "metal/include/tile.h",
        "metal/include/simdgroup_engine.h",
        "metal/include/quantized.h",
        "metal/include/operands.h",
    ),
)
_TENSOR_MATMUL = Kernel(
    name="tensor_matmul",
    inputs=_MATMUL.inputs,
    outputs=_MATMUL.outputs,
    body="kernels/linear/matmul.metal",
    headers=(
        "metal/include/tensor_engine.h",
        "metal/include/quantized.h",
        "metal/include/operands.h",
    ),
)
_TILED = {"simdgroup": _MATMUL, "tensor": _TENSOR_MATMUL}
_SHORT_MATMUL = Kernel(
    name="short_matmul",
    inputs=("x", "weight", "residual"),
    outputs=("out",),
    body="kernels/linear/short_matmul.metal",
    headers=(
        "metal/include/fragment.h",
        "metal/include/tile.h",
        "metal/include/quantized.h",
        "metal/include/direct.h",
    ),
)
_SHORT_NORM_MATMUL = Kernel(
    name="short_norm_matmul",
    inputs=("x", "norm_weight", "weight"),
    outputs=("out", "normed"),
    body="kernels/linear/short_norm_matmul.metal",
    headers=(
        "metal/include/fragment.h",
        "metal/include/tile.h",
        "metal/include/quantized.h",
        "metal/include/direct.h",
        "kernels/linear/norm_rows.h",
    ),
)
_EMBED = Kernel(
    name="embed",
    inputs=("tokens", "weight"),
    outputs=("out",),
    body="kernels/linear/embed.metal",
    headers=("metal/include/quantized.h",),
)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMSNorm of each row, in float32 and rounded once.

    Args:
        x: bfloat16 [M, K], K a multiple of 8.
        weight: bfloat16 [K], the gain (`mx.fast.rms_norm`'s weight).
        eps: added to the mean square (config ``rms_norm_eps``).

    Returns:
        bfloat16 [M, K].

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_array("x", x, (None, None))
    rows, columns = x.shape
    check_array("weight", weight, (columns,))
    if columns % 8:
        raise ValueError(f"x has {columns} columns; expected a multiple of 8")
    simdgroups = norm_simdgroups(columns)
    threads = 32 * simdgroups
    (out,) = _RMS_NORM(
        [x, weight],
        template={"K": columns, "SIMDGROUPS": simdgroups, "EPS": float(eps)},
        grid=(threads * rows, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[mx.bfloat16],
    )
    return out


def matmul(
    x: mx.array, w: QuantizedWeight, residual: mx.array | None = None, out_dtype: mx.Dtype = mx.bfloat16
) -> mx.array:
    """Product x @ w.T, with a residual added in float32 and rounded once (`mx.quantized_matmul`).

    The weights are rounded to bfloat16 after dequantisation, for the matrix instructions.

    Args:
        x: bfloat16 [M, K].
        w: the weight [N, K].
        residual: bfloat16 [M, N], or None.
        out_dtype: bfloat16 or float32.

    Returns:
        [M, N] in ``out_dtype``.

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_matrix(w)
    check_array("x", x, (None, w.columns))
    check_output_dtype(out_dtype)
    rows = x.shape[0]
    if residual is not None:
        check_array("residual", residual, (rows, w.rows))
    plan = matmul_plan(rows, w.rows, w.columns)
    across, down = -(-w.rows // plan.columns), -(-rows // plan.rows)
    (out,) = (_SHORT_MATMUL if isinstance(plan, ShortPlan) else _TILED[matrix_engine()])(
        # Without a residual the kernel reads none, and x only fills the argument.
        [x, w.packed, x if residual is None else residual],
        template={
            "T": out_dtype,
            "HAS_RESIDUAL": residual is not None,
            **weight_template(w),
            **plan.template(),
        },
        grid=(plan.threads * across, down, 1),
        threadgroup=(plan.threads, 1, 1),
        output_shapes=[(rows, w.rows)],
        output_dtypes=[out_dtype],
    )
    return out


def norm_matmul(
    x: mx.array, norm_weight: mx.array, w: QuantizedWeight, eps: float, out_dtype: mx.Dtype = mx.bfloat16
) -> tuple[mx.array, mx.array]:
    """RMSNorm of each row and a product of the normed rows: `rms_norm` and `matmul`, for few rows in one launch.

    Args:
        x: bfloat16 [M, K].
        norm_weight: bfloat16 [K], the norm's gain (`mx.fast.rms_norm`'s weight).
        w: the weight [N, K].
        eps: added to the mean square (config ``rms_norm_eps``).
        out_dtype: of the product, bfloat16 or float32.

    Returns:
        The product [M, N] in ``out_dtype``, and the normed rows bfloat16 [M, K], which are `rms_norm`'s to the bit.

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_matrix(w)
    check_array("x", x, (None, w.columns))
    check_array("norm_weight", norm_weight, (w.columns,))
    check_output_dtype(out_dtype)
    rows = x.shape[0]
    plan = norm_matmul_plan(rows, w.rows, w.columns)
    if plan is None:
        normed = rms_norm(x, norm_weight, eps)
        return matmul(normed, w, out_dtype=out_dtype), normed
    across, down = -(-w.rows // plan.columns), -(-rows // plan.rows)
    out, normed = _SHORT_NORM_MATMUL(
        [x, norm_weight, w.packed],
        template={
            "T": out_dtype,
            "EPS": float(eps),
            "PARTS": norm_simdgroups(w.columns),
            **weight_template(w),
            **plan.template(),
        },
        grid=(plan.threads * across, down, 1),
        threadgroup=(plan.threads, 1, 1),
        output_shapes=[(rows, w.rows), (rows, w.columns)],
        output_dtypes=[out_dtype, mx.bfloat16],
    )
    return out, normed


def embed(tokens: mx.array, w: QuantizedWeight) -> mx.array:
    """Rows of a quantised embedding table, rounded to bfloat16 (`mlx.nn.QuantizedEmbedding`).

    Args:
        tokens: uint32 [M]. An id beyond the table reads its last row.
        w: the table [V, K].

    Returns:
        bfloat16 [M, K].

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_matrix(w)
    check_array("tokens", tokens, (None,), mx.uint32)
    rows, units = tokens.shape[0], w.columns // 32
    (out,) = _EMBED(
        [tokens, w.packed],
        template=weight_template(w),
        grid=(units, rows, 1),
        threadgroup=(units, 1, 1),
        output_shapes=[(rows, w.columns)],
        output_dtypes=[mx.bfloat16],
    )
    return out
