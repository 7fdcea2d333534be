"""The `cpu` backend: Metal kernels compiled by the machine's C++ compiler and run at once.

Inputs are read where MLX keeps them, without a copy. Outputs are fresh arrays. A launch returns when the
kernel has run: nothing is lazy.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .cpu.compiler import build_kernel, build_runtime, find_compiler
from .cpu.translation import translate
from .errors import LaunchError, SourceError
from .launch import Launch

_MESSAGE_BYTES = 4096
_CHECKED_MODE_READY = False
_TEMPLATE_BYTES = 1 << 16  # up to this size an output starts as a copy of a kept array of zeros


class _Launch(ctypes.Structure):
    """lily::Launch in cpu/fibers.h."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("threadgroups", ctypes.c_uint32 * 3),
        ("checked", ctypes.c_uint32),
    )


class _Buffer(ctypes.Structure):
    """Python's Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_STRIDES = 0x18  # PyBUF_STRIDES
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None


def launch(launch: Launch) -> list[mx.array]:
    """Runs the kernel and returns its outputs.

    Raises:
        CompilerMissingError, CompileError: the kernel cannot be built.
        SourceError: a dtype or an array that Metal kernels do not take.
        LaunchError: the kernel broke a rule while it ran.
    """
    inputs = [x if isinstance(x, mx.array) else mx.array(x) for x in launch.inputs]
    mx.eval(inputs)
    outputs = [
        _new_array(tuple(shape), dtype)
        for shape, dtype in zip(launch.output_shapes, launch.output_dtypes, strict=True)
    ]
    key = (
        launch.text,
        tuple((name, value, type(value)) for name, value in launch.template.items()),
        tuple((x.dtype, x.ndim == 0) for x in inputs),
        tuple(launch.output_dtypes),
        _CHECKED_MODE_READY and launch.checked,
    )
    entry = _entry(*key)
    arguments, _kept = _arguments(launch, inputs, outputs)
    request = _Launch(
        entry, ctypes.addressof(arguments), launch.grid, launch.threadgroup, (0, 0, 0), key[-1]
    )
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    if _runtime().lily_run(ctypes.byref(request), message, _MESSAGE_BYTES):
        raise LaunchError(f"kernel {launch.text.name}: {message.value.decode(errors='replace')}")
    return outputs


def _arguments(
    launch: Launch, inputs: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[Any, list[Any]]:
    """The addresses of a launch's buffers, and what must stay alive while they are used."""
    text = launch.text
    pointers: list[int] = []
    kept: list[Any] = []
    for name, x in zip(text.inputs, inputs, strict=True):
        address, strides = _address(x)
        if strides is not None:
            x = mx.contiguous(x)
            mx.eval(x)
            kept.append(x)
            address, _ = _address(x)
        pointers.append(address)
        if text.shape_buffers:
            for buffer in _shape_buffers(text.shape_buffers, name, x):
                kept.append(buffer)
                pointers.append(ctypes.addressof(buffer))
    for x in outputs:
        pointers.append(_address(x)[0])
    return (ctypes.c_void_p * len(pointers))(*pointers), kept


def _shape_buffers(used: Sequence[str], name: str, x: mx.array) -> list[Any]:
    """The `_shape`, `_strides` and `_ndim` buffers of an input, those that the body uses."""
    buffers: list[Any] = []
    if name + "_shape" in used:
        buffers.append((ctypes.c_int * max(x.ndim, 1))(*x.shape))
    if name + "_strides" in used:
        strides = [math.prod(x.shape[i + 1 :]) for i in range(x.ndim)]
        buffers.append((ctypes.c_int64 * max(x.ndim, 1))(*strides))
    if name + "_ndim" in used:
        buffers.append(ctypes.c_int(x.ndim))
    return buffers


def _address(x: mx.array) -> tuple[int, tuple[int, ...] | None]:
    """Where an evaluated array's elements are, and its strides in bytes if it is not row-contiguous."""
    buffer = _Buffer()
    if _get_buffer(x, ctypes.addressof(buffer), _STRIDES) != 0:
        raise SourceError(f"an array of dtype {x.dtype} gives no access to its memory")
    strides = None
    expected = x.itemsize
    for i in range(buffer.ndim - 1, -1, -1):
        size = x.shape[i]
        if size != 1 and buffer.strides[i] != expected:
            strides = tuple(buffer.strides[: buffer.ndim])
            break
        expected *= size
    if x.size == 0:
        strides = None
    address = buffer.buf or 0
    _release_buffer(ctypes.addressof(buffer))
    return address, strides


def _new_array(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array that nothing else refers to. Its values do not matter, but they are zeros."""
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
def _runtime() -> ctypes.CDLL:
    """The C++ runtime. Kernels find its functions among the process's global symbols."""
    library = ctypes.CDLL(str(build_runtime()), mode=ctypes.RTLD_GLOBAL)
    library.lily_run.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
    library.lily_run.restype = ctypes.c_int
    return library


@functools.cache
def _entry(
    text: Any, template: tuple, inputs: tuple[tuple[mx.Dtype, bool], ...], outputs: tuple, checked: bool
) -> int:
    """The address of a kernel's compiled entry. Libraries stay loaded."""
    _runtime()
    dimensions = [(dtype, 0 if scalar else 1) for dtype, scalar in inputs]
    unit = translate(text, {name: value for name, value, _ in template}, dimensions, outputs, find_compiler().unroll)
    library = ctypes.CDLL(str(build_kernel(text.name, unit, checked)))
    return ctypes.cast(library.lily_entry, ctypes.c_void_p).value or 0
