"""Checks of the wrappers' arguments, made before any launch."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from lily_mlx.kernels import checks
from lily_mlx.kernels.checks import check_array

from .shape import DeltaNetShape

MAX_ROWS = 1 << 16


def check_rows(where: str, name: str, array: mx.array, row: Sequence[int], dtype: mx.Dtype) -> int:
    """Checks an array of 1 <= M <= MAX_ROWS rows of shape ``row`` and returns M."""
    rows = checks.check_rows(where, name, array, row, dtype)
    if rows > MAX_ROWS:
        raise ValueError(f"{where}: {name} has {rows} rows; give at most {MAX_ROWS} at once, in chunks")
    return rows


def check_convolution(
    where: str,
    conv_state: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    shape: DeltaNetShape,
) -> None:
    """Checks the convolution's window and weight and the gates' parameters."""
    window = (shape.conv_kernel - 1, shape.channels)
    check_array(where, "conv_state", conv_state, window, mx.bfloat16)
    check_gates(where, conv_weight, a_log, dt_bias, shape)


def check_gates(where: str, conv_weight: mx.array, a_log: mx.array, dt_bias: mx.array, shape: DeltaNetShape) -> None:
    """Checks the convolution's weight and the gates' parameters."""
    check_array(where, "conv_weight", conv_weight, (shape.conv_kernel, shape.channels), mx.bfloat16)
    check_array(where, "a_log", a_log, (shape.value_heads,), mx.float32)
    check_array(where, "dt_bias", dt_bias, (shape.value_heads,), mx.float32)


def check_state(where: str, state: mx.array, shape: DeltaNetShape) -> None:
    """Checks the delta rule's state."""
    check_array(where, "state", state, (shape.value_heads, shape.value_dim, shape.key_dim), mx.float32)


def check_norm(where: str, norm_weight: mx.array, shape: DeltaNetShape) -> None:
    """Checks the gated norm's weight."""
    dtype = mx.float32 if norm_weight.dtype == mx.float32 else mx.bfloat16
    check_array(where, "norm_weight", norm_weight, (shape.value_dim,), dtype)
