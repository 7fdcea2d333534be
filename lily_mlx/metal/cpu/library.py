"""The C++ runtime as a library: its functions and its structures."""

from __future__ import annotations

import ctypes
import functools

from .compiler import build_runtime

_SIZES = (ctypes.c_uint32,) * 6  # grid and threadgroup, in threads


class CheckedBuffer(ctypes.Structure):
    """lily::Buffer in checker.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("element", ctypes.c_uint32),
        ("is_output", ctypes.c_uint32),
        ("misalignment", ctypes.c_uint32),
    )


@functools.cache
def runtime() -> ctypes.CDLL:
    """The C++ runtime, compiled and loaded. Kernels find its functions among the process's symbols."""
    library = ctypes.CDLL(str(build_runtime()), mode=ctypes.RTLD_GLOBAL)
    library.lily_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *_SIZES)
    library.lily_run.restype = ctypes.c_char_p
    library.lily_run_checked.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double, *_SIZES,
    )  # fmt: skip
    library.lily_run_checked.restype = ctypes.c_char_p
    return library


@functools.cache
def runtime_with_gil() -> ctypes.PyDLL:
    """The same library for functions that use Python objects."""
    runtime()
    library = ctypes.PyDLL(str(build_runtime()))
    library.lily_addresses.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    )  # fmt: skip
    library.lily_addresses.restype = ctypes.c_int64
    return library
