"""A chunk of tokens through a Gated DeltaNet layer, between its two projections: three launches."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.checks import check_array
from lily_mlx.metal import Kernel, current_backend

from . import policy
from .checks import check_convolution, check_norm, check_rows, check_state
from .shape import DeltaNetShape
from .template import layer_template

_HEADERS = ("kernels/deltanet/deltanet.h",)
_PREPARE = Kernel(
    name="deltanet_prepare",
    inputs=("proj", "conv_state", "conv_weight", "a_log", "dt_bias"),
    outputs=("q", "k", "v", "decay", "beta", "next_conv_state"),
    body="kernels/deltanet/prepare.metal",
    headers=_HEADERS,
)
_SCAN = Kernel(
    name="deltanet_scan",
    inputs=("q", "k", "v", "decay", "beta", "state"),
    outputs=("y", "next_state"),
    body="kernels/deltanet/scan.metal",
    headers=_HEADERS,
)
_GATED_NORM = Kernel(
    name="deltanet_gated_norm",
    inputs=("y", "proj", "norm_weight"),
    outputs=("out",),
    body="kernels/deltanet/gated_norm.metal",
    headers=_HEADERS,
)


def prepare(
    proj: mx.array,
    conv_state: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    shape: DeltaNetShape,
    tile_rows: int | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]:
    """Causal convolution with SiLU, q/k normalisation and gates of M rows.

    q = x_q / (sqrt(Dk) |x_q|) and k = x_k / |x_k| with 1e-6 added to the sum of squares, as in mlx_lm's
    ``normalize_qk``; decay = exp(-exp(a_log) softplus(a + dt_bias)); beta = sigmoid(b).

    Args:
        proj: bfloat16 [M, P], the joined projection, M >= 1.
        conv_state: bfloat16 [3, C], the convolution's inputs before the chunk, oldest first.
        conv_weight: bfloat16 [4, C], tap-major, the oldest input's tap first.
        a_log: float32 [Hv], logarithm of the decay rate (checkpoint ``A_log``).
        dt_bias: float32 [Hv], added to ``a`` before the softplus.
        shape: the layer's shape.
        tile_rows: rows of a tile; the policy's choice if None. It does not change the result.

    Returns:
        q and k bfloat16 [M, Hk, Dk], v bfloat16 [M, Hv, Dv], decay and beta float32 [M, Hv], and the next
        conv_state, the last 3 rows of conv_state and proj together.

    Raises:
        ValueError: wrong shape or dtype.
    """
    rows = check_rows("deltanet.prepare", "proj", proj, (shape.projection_width,), mx.bfloat16)
    check_convolution("deltanet.prepare", conv_state, conv_weight, a_log, dt_bias, shape)
    key_heads, value_heads = shape.key_heads, shape.value_heads
    tile_rows = tile_rows or policy.prepare_tile(rows)
    simdgroups = policy.PREPARE_SIMDGROUPS
    units = 2 * key_heads + value_heads + -(-value_heads // 32)
    q, k, v, decay, beta, next_conv_state = _PREPARE(
        [proj, conv_state, conv_weight, a_log, dt_bias],
        template={
            **layer_template(shape),
            "CONV": shape.conv_kernel,
            "Q_SCALE": float(shape.key_dim) ** -0.5,
            "ROWS": tile_rows,
            "SIMDGROUPS": simdgroups,
        },
        grid=(32 * simdgroups * -(-units // simdgroups), -(-rows // tile_rows), 1),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[
            (rows, key_heads, shape.key_dim),
            (rows, key_heads, shape.key_dim),
            (rows, value_heads, shape.value_dim),
            (rows, value_heads),
            (rows, value_heads),
            conv_state.shape,
        ],
        output_dtypes=[mx.bfloat16, mx.bfloat16, mx.bfloat16, mx.float32, mx.float32, mx.bfloat16],
    )
    return q, k, v, decay, beta, next_conv_state


def scan(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array,
    shape: DeltaNetShape,
    columns: policy.Columns | None = None,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule over M tokens, one after another.

    For each value head, with the q and k of its key head: S <- decay S; S <- S + beta (v - S k) k^T; y = S q.
    The state stays in float32 from the first token to the last, so that chunks of any size give the same
    bits.

    Args:
        q, k: bfloat16 [M, Hk, Dk], normalised, q scaled too; M >= 1.
        v: bfloat16 [M, Hv, Dv].
        decay, beta: float32 [M, Hv].
        state: float32 [Hv, Dv, Dk], the state before the chunk.
        shape: the layer's shape.
        columns: how simdgroups share the state; the backend's policy if None.

    Returns:
        y bfloat16 [M, Hv * Dv] and the next state, a new array.

    Raises:
        ValueError: wrong shape or dtype.
    """
    rows = check_rows("deltanet.scan", "q", q, (shape.key_heads, shape.key_dim), mx.bfloat16)
    check_array("deltanet.scan", "k", k, q.shape, mx.bfloat16)
    check_array("deltanet.scan", "v", v, (rows, shape.value_heads, shape.value_dim), mx.bfloat16)
    check_array("deltanet.scan", "decay", decay, (rows, shape.value_heads), mx.float32)
    check_array("deltanet.scan", "beta", beta, (rows, shape.value_heads), mx.float32)
    check_state("deltanet.scan", state, shape)
    split = columns or policy.scan_columns(current_backend())
    y, next_state = _SCAN(
        [q, k, v, decay, beta, state],
        template={
            **layer_template(shape),
            "LANES": split.lanes,
            "COLUMNS": split.columns,
            "SIMDGROUPS": split.simdgroups,
            "AHEAD": split.ahead,
        },
        grid=(32 * split.simdgroups * (shape.value_dim // split.part), shape.value_heads, 1),
        threadgroup=(32 * split.simdgroups, 1, 1),
        output_shapes=[(rows, shape.value_heads * shape.value_dim), state.shape],
        output_dtypes=[mx.bfloat16, mx.float32],
    )
    return y, next_state


def gated_norm(y: mx.array, proj: mx.array, norm_weight: mx.array, shape: DeltaNetShape, eps: float) -> mx.array:
    """RMSNorm over each value head, times its weight, times silu(z).

    Args:
        y: bfloat16 [M, Hv * Dv], M >= 1.
        proj: bfloat16 [M, P], the joined projection, which holds z.
        norm_weight: bfloat16 or float32 [Dv], shared by the heads.
        shape: the layer's shape.
        eps: added to the mean of squares (config ``rms_norm_eps``).

    Returns:
        bfloat16 [M, Hv * Dv].

    Raises:
        ValueError: wrong shape or dtype.
    """
    rows = check_rows("deltanet.gated_norm", "proj", proj, (shape.projection_width,), mx.bfloat16)
    check_array("deltanet.gated_norm", "y", y, (rows, shape.value_heads * shape.value_dim), mx.bfloat16)
    check_norm("deltanet.gated_norm", norm_weight, shape)
    simdgroups = policy.NORM_SIMDGROUPS
    (out,) = _GATED_NORM(
        [y, proj, norm_weight],
        template={**layer_template(shape), "SIMDGROUPS": simdgroups, "EPS": float(eps)},
        grid=(32 * simdgroups * -(-rows * shape.value_heads // simdgroups), 1, 1),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[y.shape],
        output_dtypes=[mx.bfloat16],
    )
    return out
