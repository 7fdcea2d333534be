"""Input checks that the linear and sampling wrappers share."""

from __future__ import annotations

import mlx.core as mx

from .policy import MOST_STAGED_COLUMNS
from .weight import QuantizedWeight

# MLX passes inputs with fewer elements in Metal's `constant` address space, which helpers do not take.
SMALLEST_BUFFER = 8


def check_array(name: str, array: mx.array, shape: tuple[int | None, ...], dtype: mx.Dtype = mx.bfloat16) -> None:
    """Checks an array's shape (None: any size from 1) and dtype.

    Raises:
        ValueError: with the array's name, what it is and what it should be.
    """
    fits = len(array.shape) == len(shape) and all(
        size == want or (want is None and size >= 1) for size, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"{name} has shape {list(array.shape)}; expected {wanted}")
    if array.dtype != dtype:
        raise ValueError(f"{name} is {array.dtype}; expected {dtype}")


def check_matrix(w: QuantizedWeight) -> None:
    """Checks that a weight is one matrix [N, K] with K a multiple of 32.

    Raises:
        ValueError: it is a stack of matrices.
    """
    if w.lead:
        raise ValueError(f"the weight is a stack of matrices of shape {list(w.shape)}; expected one matrix")


def check_staged(columns: int) -> None:
    """Checks that a row of activations fits the threadgroup memory of a decode kernel.

    Raises:
        ValueError: it does not.
    """
    if columns > MOST_STAGED_COLUMNS:
        raise ValueError(f"a row has {columns} columns; the decode kernels take at most {MOST_STAGED_COLUMNS}")


def check_output_dtype(dtype: mx.Dtype) -> None:
    """Checks the dtype of a product.

    Raises:
        ValueError: neither bfloat16 nor float32.
    """
    if dtype not in (mx.bfloat16, mx.float32):
        raise ValueError(f"out_dtype is {dtype}; expected bfloat16 or float32")


def weight_template(w: QuantizedWeight) -> dict[str, int]:
    """The format of a weight [N, K] as template parameters of a kernel, which finds its sections by them."""
    return {"BITS": w.bits, "GROUP": w.group_size, "N": w.rows, "K": w.columns}
