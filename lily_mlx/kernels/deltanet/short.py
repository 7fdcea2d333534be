"""Few rows through a Gated DeltaNet layer, from its first projection to its gated norm: one launch."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.checks import check_array
from lily_mlx.metal import Kernel, current_backend

from . import policy
from .checks import check_convolution, check_gates, check_norm, check_rows, check_state
from .shape import DeltaNetShape
from .template import layer_template

_SHORT = Kernel(
    name="deltanet_short",
    inputs=("proj", "conv_state", "state", "conv_weight", "a_log", "dt_bias", "norm_weight"),
    outputs=("out", "next_conv_state", "next_state"),
    body="kernels/deltanet/short.metal",
    headers=("kernels/deltanet/deltanet.h",),
)
_SCAN_PIECE, _STEP_PIECE = 8, 4  # keys that a lane of scan.metal and of step.metal takes at once


def short_chunk(
    proj: mx.array,
    conv_state: mx.array,
    state: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    shape: DeltaNetShape,
    eps: float,
    columns: policy.Columns | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """`prepare`, `scan` and `gated_norm` of M rows in one launch, with the same bits.

    Their docstrings hold the formulas. One threadgroup takes a head's rows one after another, so that this is for few
    of them: `policy.short_rows`.

    Args:
        proj: bfloat16 [M, P], the joined projection, M >= 1.
        conv_state: bfloat16 [3, C], the convolution's inputs before the chunk, oldest first.
        state: float32 [Hv, Dv, Dk], the delta rule's state before the chunk.
        conv_weight: bfloat16 [4, C], tap-major, the oldest input's tap first.
        a_log: float32 [Hv], logarithm of the decay rate (checkpoint ``A_log``).
        dt_bias: float32 [Hv], added to ``a`` before the softplus.
        norm_weight: bfloat16 or float32 [Dv], shared by the heads.
        shape: the layer's shape.
        eps: added to the mean of squares (config ``rms_norm_eps``).
        columns: how simdgroups share the state, all columns of a head; the backend's policy if None.

    Returns:
        The normed and gated y, bfloat16 [M, Hv * Dv]; the next conv_state and state, new arrays.

    Raises:
        ValueError: wrong shape or dtype, or ``columns`` of another size than a head.
    """
    where = "deltanet.short_chunk"
    check_rows(where, "proj", proj, (shape.projection_width,), mx.bfloat16)
    check_convolution(where, conv_state, conv_weight, a_log, dt_bias, shape)
    check_state(where, state, shape)
    check_norm(where, norm_weight, shape)
    split = _whole_head(where, shape, columns)
    layer = conv_weight, a_log, dt_bias, norm_weight
    return _launch(proj, conv_state, state, layer, shape, eps, 1, split, _SCAN_PIECE)


def batch_step(
    proj: mx.array,
    conv_state: mx.array,
    state: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    shape: DeltaNetShape,
    eps: float,
    columns: policy.Columns | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """`step` and `gated_norm` of B sequences in one launch. Each has the bits that it would have alone.

    Args:
        proj: bfloat16 [B, P], the joined projection, a row for each sequence.
        conv_state: bfloat16 [B, 3, C], the convolutions' last inputs, oldest first.
        state: float32 [B, Hv, Dv, Dk], the delta rule's states.
        conv_weight, a_log, dt_bias, norm_weight, shape, eps, columns: see `short_chunk`.

    Returns:
        The normed and gated y, bfloat16 [B, Hv * Dv]; the next conv_state and state, new arrays.

    Raises:
        ValueError: wrong shape or dtype, or ``columns`` of another size than a head.
    """
    where = "deltanet.batch_step"
    rows = check_rows(where, "proj", proj, (shape.projection_width,), mx.bfloat16)
    check_array(where, "conv_state", conv_state, (rows, shape.conv_kernel - 1, shape.channels), mx.bfloat16)
    check_array(where, "state", state, (rows, shape.value_heads, shape.value_dim, shape.key_dim), mx.float32)
    check_gates(where, conv_weight, a_log, dt_bias, shape)
    check_norm(where, norm_weight, shape)
    split = _whole_head(where, shape, columns)
    layer = conv_weight, a_log, dt_bias, norm_weight
    return _launch(proj, conv_state, state, layer, shape, eps, rows, split, _STEP_PIECE)


def _whole_head(where: str, shape: DeltaNetShape, columns: policy.Columns | None) -> policy.Columns:
    """The split of a head's columns over one threadgroup."""
    split = columns or policy.short_columns(current_backend())
    if split.part != shape.value_dim:
        raise ValueError(
            f"{where}: columns shares {split.part} columns of a head among a threadgroup; "
            f"it must share all {shape.value_dim}, because the norm needs them"
        )
    return split


def _launch(
    proj: mx.array,
    conv_state: mx.array,
    state: mx.array,
    layer: tuple[mx.array, mx.array, mx.array, mx.array],
    shape: DeltaNetShape,
    eps: float,
    sequences: int,
    split: policy.Columns,
    piece: int,
) -> tuple[mx.array, mx.array, mx.array]:
    total = proj.shape[0]
    out, next_conv_state, next_state = _SHORT(
        [proj, conv_state, state, *layer],
        template={
            **layer_template(shape),
            "CONV": shape.conv_kernel,
            "Q_SCALE": float(shape.key_dim) ** -0.5,
            "EPS": float(eps),
            "LANES": split.lanes,
            "COLUMNS": split.columns,
            "SIMDGROUPS": split.simdgroups,
            "PIECE": piece,
            "BLOCK": policy.short_block(total // sequences),
        },
        grid=(32 * split.simdgroups * shape.value_heads, sequences, 1),
        threadgroup=(32 * split.simdgroups, 1, 1),
        output_shapes=[(total, shape.value_heads * shape.value_dim), conv_state.shape, state.shape],
        output_dtypes=[mx.bfloat16, mx.bfloat16, mx.float32],
    )
    return out, next_conv_state, next_state
