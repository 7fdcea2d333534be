"""MLX arrays seen from C++: where their elements are, and fresh ones for outputs."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence

import mlx.core as mx

from ..errors import SourceError
from .library import runtime, runtime_with_gil

# Up to this size an output starts as a copy of a kept array of zeros, which is faster than evaluating one.
_TEMPLATE_BYTES = 1 << 16

_GET_BUFFER = ctypes.cast(ctypes.pythonapi.PyObject_GetBuffer, ctypes.c_void_p)
_RELEASE_BUFFER = ctypes.cast(ctypes.pythonapi.PyBuffer_Release, ctypes.c_void_p)


def addresses(arrays: Sequence[mx.array]) -> tuple[list[int], int]:
    """The addresses of evaluated arrays, and the number of the first that is not row-contiguous, or -1.

    Arrays must stay referenced while the addresses are used.

    Raises:
        SourceError: an array gives no access to its memory, for instance because it is on a GPU.
    """
    count = len(arrays)
    objects = (ctypes.py_object * count)(*arrays)
    found = (ctypes.c_size_t * count)()
    strided = runtime_with_gil().lily_addresses(_GET_BUFFER, _RELEASE_BUFFER, objects, count, found)
    if strided < -1:
        raise SourceError(f"an array of dtype {arrays[-2 - strided].dtype} gives no access to its memory")
    return list(found), strided


def contiguous(arrays: list[mx.array]) -> list[int]:
    """The addresses of evaluated arrays; those that are not row-contiguous are replaced by copies."""
    while True:
        found, strided = addresses(arrays)
        if strided < 0:
            return found
        arrays[strided] = mx.contiguous(arrays[strided])
        mx.eval(arrays[strided])


def new_array(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An evaluated array that nothing else refers to. Its values do not matter."""
    if math.prod(shape) * dtype.size <= _TEMPLATE_BYTES:
        return mx.array(_zeros(shape, dtype).__dlpack__())
    x = mx.zeros(shape, dtype)
    mx.eval(x)
    return x


@functools.lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    x = mx.zeros(shape, dtype)
    mx.eval(x)
    return x


@functools.cache
def fresh_alignment() -> int:
    """The address of a fresh array modulo 16. MLX's CPU allocator puts 8 bytes before it."""
    runtime()
    x = mx.zeros((64,), mx.float32)
    mx.eval(x)
    return addresses([x])[0][0] % 16
