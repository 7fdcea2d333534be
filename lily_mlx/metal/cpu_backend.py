"""The `cpu` backend: Metal kernels compiled by the machine's C++ compiler and run at once.

Inputs are read where MLX keeps them, without a copy. Outputs are fresh arrays. A launch returns when the
kernel has run: nothing is lazy.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .cpu.compiler import build_kernel, build_runtime, find_compiler, source_line
from .cpu.translation import translate
from .errors import LaunchError, SourceError
from .launch import Launch

TIMEOUT_ENVIRONMENT = "LILY_MLX_TIMEOUT"
_DEFAULT_TIMEOUT = 300.0
_MESSAGE_BYTES = 4096
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


class _CheckedBuffer(ctypes.Structure):
    """lily::Buffer in cpu/checker.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("element", ctypes.c_uint32),
        ("is_output", ctypes.c_uint32),
        ("misalignment", ctypes.c_uint32),
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
        launch.checked,
    )
    library, entry = _entry(*key)
    buffers = _buffers(launch, inputs, outputs)
    arguments = (ctypes.c_void_p * len(buffers))(*(buffer.address for buffer in buffers))
    request = _Launch(
        entry, ctypes.addressof(arguments), launch.grid, launch.threadgroup, (0, 0, 0), launch.checked
    )
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    if launch.checked:
        checked = (_CheckedBuffer * len(buffers))(*(buffer.checked() for buffer in buffers))
        failed = _runtime().lily_run_checked(
            ctypes.byref(request), checked, len(buffers), _timeout(), message, _MESSAGE_BYTES
        )
    else:
        failed = _runtime().lily_run(ctypes.byref(request), message, _MESSAGE_BYTES)
    if failed:
        raise LaunchError(f"kernel {launch.text.name}: {_with_lines(message.value, library)}")
    return outputs


class _Argument(NamedTuple):
    """A buffer of a launch: its address, and the object that keeps it alive."""

    name: str
    address: int
    size: int
    element: int
    is_output: bool
    owner: Any

    def checked(self) -> tuple[bytes, int, int, int, bool, int]:
        is_array = isinstance(self.owner, mx.array)
        # MLX aligns a fresh array to 16 bytes on a GPU; here only its distance from a fresh one counts.
        misalignment = (self.address - _fresh_alignment()) % 16 if is_array else 0
        return (self.name.encode(), self.address, self.size, self.element, self.is_output, misalignment)


def _buffers(launch: Launch, inputs: Sequence[mx.array], outputs: Sequence[mx.array]) -> list[_Argument]:
    """The buffers of a launch in MLX's order: each input with its shape buffers, then the outputs."""
    text = launch.text
    buffers: list[_Argument] = []
    for name, x in zip(text.inputs, inputs, strict=True):
        address, contiguous = _address(x)
        if not contiguous:
            x = mx.contiguous(x)
            mx.eval(x)
            address, _ = _address(x)
        buffers.append(_Argument(name, address, x.nbytes, x.itemsize, False, x))
        if text.shape_buffers:
            buffers += _shape_buffers(text.shape_buffers, name, x)
    for name, x in zip(text.outputs, outputs, strict=True):
        buffers.append(_Argument(name, _address(x)[0], x.nbytes, x.itemsize, True, x))
    return buffers


def _with_lines(message: bytes, library: str) -> str:
    """A message of the runtime with instruction addresses turned into lines of the kernel's text."""

    def line(match: re.Match[str]) -> str:
        return source_line(library, int(match.group(1), 16)) or f"instruction 0x{match.group(1)} of {library}"

    return re.sub("\x01([0-9a-f]+)\x02", line, message.decode(errors="replace"))


def _timeout() -> float:
    """Seconds that a launch may take in checked mode."""
    given = os.environ.get(TIMEOUT_ENVIRONMENT, "")
    try:
        return float(given) if given else _DEFAULT_TIMEOUT
    except ValueError:
        raise SourceError(f"{TIMEOUT_ENVIRONMENT}={given!r} must be a number of seconds") from None


def _shape_buffers(used: Sequence[str], name: str, x: mx.array) -> list[_Argument]:
    """The `_shape`, `_strides` and `_ndim` buffers of an input, those that the body uses."""
    buffers: list[_Argument] = []

    def add(suffix: str, kind: Any, values: Sequence[int]) -> None:
        if name + suffix in used:
            owner = (kind * max(len(values), 1))(*values)
            size = ctypes.sizeof(kind)
            buffers.append(
                _Argument(name + suffix, ctypes.addressof(owner), size * len(values), size, False, owner)
            )

    add("_shape", ctypes.c_int, x.shape)
    add("_strides", ctypes.c_int64, [math.prod(x.shape[i + 1 :]) for i in range(x.ndim)])
    add("_ndim", ctypes.c_int, [x.ndim])
    return buffers


def _address(x: mx.array) -> tuple[int, bool]:
    """Where an evaluated array's elements are, and whether it is row-contiguous."""
    buffer = _Buffer()
    if _get_buffer(x, ctypes.addressof(buffer), _STRIDES) != 0:
        raise SourceError(f"an array of dtype {x.dtype} gives no access to its memory")
    contiguous = True
    expected = x.itemsize
    if x.size > 1:
        for i in range(x.ndim - 1, -1, -1):
            size = x.shape[i]
            if size != 1 and buffer.strides[i] != expected:
                contiguous = False
                break
            expected *= size
    address = buffer.buf or 0
    _release_buffer(ctypes.addressof(buffer))
    return address, contiguous


@functools.cache
def _fresh_alignment() -> int:
    """The address of a fresh array modulo 16. MLX's CPU allocator puts 8 bytes before it."""
    x = mx.zeros((64,), mx.float32)
    mx.eval(x)
    return _address(x)[0] % 16


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
    library.lily_run_checked.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double, ctypes.c_char_p, ctypes.c_size_t,
    )  # fmt: skip
    library.lily_run_checked.restype = ctypes.c_int
    return library


@functools.cache
def _entry(
    text: Any, template: tuple, inputs: tuple[tuple[mx.Dtype, bool], ...], outputs: tuple, checked: bool
) -> tuple[str, int]:
    """A kernel's compiled library and the address of its entry. Libraries stay loaded."""
    _runtime()
    dimensions = [(dtype, 0 if scalar else 1) for dtype, scalar in inputs]
    unit = translate(text, {name: value for name, value, _ in template}, dimensions, outputs, find_compiler().unroll)
    path = str(build_kernel(text.name, unit, checked))
    return path, ctypes.cast(ctypes.CDLL(path).lily_entry, ctypes.c_void_p).value or 0
