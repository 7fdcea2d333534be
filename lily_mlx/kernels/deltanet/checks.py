"""Checks of the wrappers' arguments, made before any launch."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .shape import DeltaNetShape

MAX_ROWS = 1 << 16


def check_array(where: str, name: str, array: mx.array, shape: Sequence[int], dtype: mx.Dtype) -> None:
    """Raises a ValueError that names the array unless it has this shape and dtype."""
    if array.dtype != dtype or tuple(array.shape) != tuple(shape):
        raise ValueError(
            f"{where}: {name} must be {_dtype_name(dtype)} {list(shape)}, "
            f"got {_dtype_name(array.dtype)} {list(array.shape)}"
        )


def check_rows(where: str, name: str, array: mx.array, row: Sequence[int], dtype: mx.Dtype) -> int:
    """Checks an array of 1 <= M <= MAX_ROWS rows of shape ``row`` and returns M."""
    rows = array.shape[0] if array.ndim else 0
    if array.dtype != dtype or array.ndim != len(row) + 1 or tuple(array.shape[1:]) != tuple(row) or rows < 1:
        raise ValueError(
            f"{where}: {name} must be {_dtype_name(dtype)} {['M', *row]} with at least one row, "
            f"got {_dtype_name(array.dtype)} {list(array.shape)}"
        )
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
    check_array(where, "conv_weight", conv_weight, (shape.conv_kernel, shape.channels), mx.bfloat16)
    check_array(where, "a_log", a_log, (shape.value_heads,), mx.float32)
    check_array(where, "dt_bias", dt_bias, (shape.value_heads,), mx.float32)


def check_state(where: str, state: mx.array, shape: DeltaNetShape) -> None:
    """Checks the delta rule's state."""
    check_array(where, "state", state, (shape.value_heads, shape.value_dim, shape.key_dim), mx.float32)


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rsplit(".", 1)[-1]
