"""Matrix-vector products for one token, with what stands directly before and after them."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.metal import Kernel

from .checks import (
    check_array,
    check_matrix,
    check_output_dtype,
    check_staged,
    weight_template,
)
from .policy import MatvecPlan, gated_norm_plan, matvec_plan
from .weight import QuantizedWeight

_HEADERS = ("metal/include/quantized.h", "kernels/linear/matvec.h")
_STAGED_HEADERS = (*_HEADERS, "kernels/linear/prologue.h")
_HEAD_SIZES = (8, 16, 32, 64, 128, 256)

_NORM_PROJECT = Kernel(
    name="norm_project",
    inputs=("x", "norm_weight", "weight"),
    outputs=("out",),
    body="kernels/linear/norm_project.metal",
    headers=_STAGED_HEADERS,
)
_PROJECT_ADD = Kernel(
    name="project_add",
    inputs=("x", "weight", "residual"),
    outputs=("out",),
    body="kernels/linear/project_add.metal",
    headers=_HEADERS,
)
_GATED_NORM_PROJECT_ADD = Kernel(
    name="gated_norm_project_add",
    inputs=("y", "projection", "norm_weight", "weight", "residual"),
    outputs=("out",),
    body="kernels/linear/gated_norm_project_add.metal",
    headers=_STAGED_HEADERS,
)


def norm_project(
    x: mx.array, norm_weight: mx.array, w: QuantizedWeight, eps: float, out_dtype: mx.Dtype = mx.bfloat16
) -> mx.array:
    """RMSNorm, rounded to bfloat16, and projection of one row.

    Args:
        x: bfloat16 [1, K], K at most 8,192.
        norm_weight: bfloat16 [K], the norm's gain (`mx.fast.rms_norm`'s weight).
        w: the projection [N, K].
        eps: added to the mean square (config ``rms_norm_eps``).
        out_dtype: bfloat16 or float32.

    Returns:
        [1, N] in ``out_dtype``.

    Raises:
        ValueError: wrong shape, dtype or size.
    """
    check_matrix(w)
    check_array("x", x, (1, w.columns))
    check_array("norm_weight", norm_weight, (w.columns,))
    check_staged(w.columns)
    check_output_dtype(out_dtype)
    return _launch(_NORM_PROJECT, [x, norm_weight, w.packed], w, {"T": out_dtype, "EPS": float(eps)}, out_dtype)


def project_add(x: mx.array, w: QuantizedWeight, residual: mx.array) -> mx.array:
    """Projection of one row, added to the residual in float32 and rounded once.

    Args:
        x: bfloat16 [1, K].
        w: the projection [N, K].
        residual: bfloat16 [1, N].

    Returns:
        bfloat16 [1, N].

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_matrix(w)
    check_array("x", x, (1, w.columns))
    check_array("residual", residual, (1, w.rows))
    return _launch(_PROJECT_ADD, [x, w.packed, residual], w, {}, mx.bfloat16)


def gated_norm_project_add(
    y: mx.array,
    proj: mx.array,
    z_offset: int,
    norm_weight: mx.array,
    w: QuantizedWeight,
    residual: mx.array,
    eps: float,
) -> mx.array:
    """Gated RMSNorm over each head, rounded to bfloat16, projection, and residual: a DeltaNet layer's output.

    The projection's input is norm(y) * norm_weight * silu(z), as `Qwen3NextRMSNormGated` of mlx-lm.

    Args:
        y: bfloat16 [1, K], heads of ``norm_weight.size`` values; K at most 8,192.
        proj: bfloat16 [1, P]; z is ``proj[:, z_offset : z_offset + K]``.
        z_offset: a multiple of 8.
        norm_weight: bfloat16 [Dv], Dv a power of two from 8 to 256.
        w: the projection [N, K].
        residual: bfloat16 [1, N].
        eps: added to the mean square (config ``rms_norm_eps``).

    Returns:
        bfloat16 [1, N].

    Raises:
        ValueError: wrong shape, dtype or size.
    """
    check_matrix(w)
    check_array("y", y, (1, w.columns))
    check_array("proj", proj, (1, None))
    check_array("norm_weight", norm_weight, (None,))
    check_array("residual", residual, (1, w.rows))
    check_staged(w.columns)
    head = norm_weight.shape[0]
    if head not in _HEAD_SIZES or w.columns % head:
        raise ValueError(f"norm_weight has {head} values; expected one of {_HEAD_SIZES} that divides {w.columns}")
    if z_offset % 8 or not 0 <= z_offset <= proj.shape[1] - w.columns:
        raise ValueError(
            f"z_offset is {z_offset}; expected a multiple of 8 from 0 to {proj.shape[1] - w.columns} "
            f"(proj has {proj.shape[1]} columns, z has {w.columns})"
        )
    return _launch(
        _GATED_NORM_PROJECT_ADD,
        [y, proj, norm_weight, w.packed, residual],
        w,
        {"HEAD": head, "Z_OFFSET": z_offset, "EPS": float(eps)},
        mx.bfloat16,
        gated_norm_plan(w.rows, w.columns, w.bits),
    )


def _launch(
    kernel: Kernel,
    inputs: list[mx.array],
    w: QuantizedWeight,
    template: dict,
    out_dtype: mx.Dtype,
    plan: MatvecPlan | None = None,
) -> mx.array:
    plan = plan or matvec_plan(w.rows, w.columns, w.bits)
    (out,) = kernel(
        inputs,
        template={**template, **weight_template(w), **plan.template()},
        grid=(plan.threads * plan.blocks(w.rows), 1, 1),
        threadgroup=(plan.threads, 1, 1),
        output_shapes=[(1, w.rows)],
        output_dtypes=[out_dtype],
    )
    return out
