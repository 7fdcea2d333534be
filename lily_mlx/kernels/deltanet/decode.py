"""One token through a Gated DeltaNet layer, between its projections: one launch."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.checks import check_array
from lily_mlx.metal import Kernel, current_backend

from . import policy
from .checks import check_convolution, check_state
from .shape import DeltaNetShape
from .template import layer_template

_STEP = Kernel(
    name="deltanet_step",
    inputs=("proj", "conv_state", "state", "conv_weight", "a_log", "dt_bias"),
    outputs=("y", "next_conv_state", "next_state"),
    body="kernels/deltanet/step.metal",
    headers=("kernels/deltanet/deltanet.h",),
)


def step(
    proj: mx.array,
    conv_state: mx.array,
    state: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    shape: DeltaNetShape,
    columns: policy.Columns | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Convolution, SiLU, q/k normalisation, gates and delta rule of one token.

    The same as `prepare` and `scan` of one row; their docstrings hold the formulas. The gated norm that
    follows is the prologue of `lily_mlx.kernels.linear.gated_norm_project_add`.

    Args:
        proj: bfloat16 [1, P], the joined projection.
        conv_state: bfloat16 [3, C], the convolution's last inputs, oldest first.
        state: float32 [Hv, Dv, Dk], the delta rule's state.
        conv_weight: bfloat16 [4, C], tap-major, the oldest input's tap first.
        a_log: float32 [Hv], logarithm of the decay rate (checkpoint ``A_log``).
        dt_bias: float32 [Hv], added to ``a`` before the softplus.
        shape: the layer's shape.
        columns: how simdgroups share the state; the backend's policy if None.

    Returns:
        y bfloat16 [1, Hv * Dv]; the next conv_state and state, new arrays.

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_array("deltanet.step", "proj", proj, (1, shape.projection_width), mx.bfloat16)
    check_convolution("deltanet.step", conv_state, conv_weight, a_log, dt_bias, shape)
    check_state("deltanet.step", state, shape)
    split = columns or policy.step_columns(current_backend())
    y, next_conv_state, next_state = _STEP(
        [proj, conv_state, state, conv_weight, a_log, dt_bias],
        template={
            **layer_template(shape),
            "CONV": shape.conv_kernel,
            "Q_SCALE": float(shape.key_dim) ** -0.5,
            "LANES": split.lanes,
            "COLUMNS": split.columns,
            "SIMDGROUPS": split.simdgroups,
        },
        grid=(32 * split.simdgroups * (shape.value_dim // split.part), shape.value_heads, 1),
        threadgroup=(32 * split.simdgroups, 1, 1),
        output_shapes=[(1, shape.value_heads * shape.value_dim), conv_state.shape, state.shape],
        output_dtypes=[mx.bfloat16, mx.bfloat16, mx.float32],
    )
    return y, next_conv_state, next_state
