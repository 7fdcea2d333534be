"""Checks of arrays that several families' wrappers make before any launch."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def check_array(where: str, name: str, array: mx.array, shape: Sequence[int], dtype: mx.Dtype) -> None:
    """Raises a ValueError that names the array unless it has this shape and dtype."""
    if array.dtype != dtype or tuple(array.shape) != tuple(shape):
        raise ValueError(
            f"{where}: {name} must be {_dtype_name(dtype)} {list(shape)}, "
            f"got {_dtype_name(array.dtype)} {list(array.shape)}"
        )


def check_rows(where: str, name: str, array: mx.array, row: Sequence[int], dtype: mx.Dtype) -> int:
    """Checks an array of M >= 1 rows of shape ``row`` and returns M."""
    rows = array.shape[0] if array.ndim else 0
    if array.dtype != dtype or array.ndim != len(row) + 1 or tuple(array.shape[1:]) != tuple(row) or rows < 1:
        raise ValueError(
            f"{where}: {name} must be {_dtype_name(dtype)} {['M', *row]} with at least one row, "
            f"got {_dtype_name(array.dtype)} {list(array.shape)}"
        )
    return rows


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rsplit(".", 1)[-1]
