"""The `cpu` backend: Metal kernels compiled by the machine's C++ compiler and run at once.

Inputs are read where MLX keeps them, without a copy. Outputs are fresh arrays. A launch returns when the
kernel has run: nothing is lazy.

In checked mode the kernel works on guarded copies, and an access outside a buffer or a threadgroup array, a
write to an input, a read of a value that nobody wrote, a race, a barrier or simd operation that not all
threads reach, a misaligned vector access and an endless loop are errors that name thread and line.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .cpu.arrays import contiguous, fresh_alignment, new_array
from .cpu.compiler import build_kernel, find_compiler, source_line
from .cpu.library import CheckedBuffer, runtime
from .cpu.translation import translate
from .errors import LaunchError, SourceError
from .launch import Launch
from .source import KernelText

TIMEOUT_ENVIRONMENT = "LILY_MLX_TIMEOUT"
_DEFAULT_TIMEOUT = 300.0


class _Compiled(NamedTuple):
    """A kernel for one set of template values and dtypes. The text is kept because its id is the key."""

    text: KernelText
    library: str
    entry: int


class _Buffer(NamedTuple):
    """A buffer of a checked launch; `owner` keeps it alive."""

    name: str
    address: int
    size: int
    element: int
    is_output: bool
    owner: Any

    def checked(self) -> CheckedBuffer:
        # What counts is how far the array is from the place where MLX puts a fresh one.
        on_gpu = isinstance(self.owner, mx.array)
        misalignment = (self.address - fresh_alignment()) % 16 if on_gpu else 0
        return CheckedBuffer(self.name.encode(), self.address, self.size, self.element, self.is_output, misalignment)


_compiled: dict[tuple[Any, ...], _Compiled] = {}


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
        new_array(tuple(shape), dtype) for shape, dtype in zip(launch.output_shapes, launch.output_dtypes, strict=True)
    ]
    kernel = _kernel(launch, inputs)
    arrays = inputs + outputs
    found = contiguous(arrays)
    if launch.checked or launch.text.shape_buffers:
        buffers = _buffers(launch.text, arrays, found)
        found = [buffer.address for buffer in buffers]
    if launch.checked:
        checked = (CheckedBuffer * len(buffers))(*(buffer.checked() for buffer in buffers))
        message = runtime().lily_run_checked(
            kernel.entry, checked, len(buffers), _timeout(), *launch.grid, *launch.threadgroup
        )
    else:
        arguments = (ctypes.c_void_p * len(found))(*found)
        message = runtime().lily_run(kernel.entry, arguments, *launch.grid, *launch.threadgroup)
    if message is not None:
        raise LaunchError(f"kernel {launch.text.name}: {_with_lines(message, kernel.library)}")
    return outputs


def _kernel(launch: Launch, inputs: Sequence[mx.array]) -> _Compiled:
    """The compiled kernel of a launch, from this process, from the cache of files, or built now."""
    key = (
        id(launch.text),
        tuple((name, value, type(value)) for name, value in launch.template.items()),
        tuple((x.dtype, x.ndim == 0) for x in inputs),
        tuple(launch.output_dtypes),
        launch.checked,
    )
    kernel = _compiled.get(key)
    if kernel is None:
        runtime()
        text = launch.text
        dimensions = [(x.dtype, x.ndim) for x in inputs]
        unit = translate(text, launch.template, dimensions, launch.output_dtypes, find_compiler().unroll)
        library = str(build_kernel(text.name, unit, launch.checked))
        entry = ctypes.cast(ctypes.CDLL(library).lily_entry, ctypes.c_void_p).value or 0
        kernel = _compiled[key] = _Compiled(text, library, entry)
    return kernel


def _buffers(text: KernelText, arrays: Sequence[mx.array], found: Sequence[int]) -> list[_Buffer]:
    """The buffers of a launch in MLX's order: each input with its shape buffers, then the outputs."""
    buffers: list[_Buffer] = []
    inputs = len(text.inputs)
    for name, x, address in zip(text.inputs, arrays[:inputs], found[:inputs], strict=True):
        buffers.append(_Buffer(name, address, x.nbytes, x.itemsize, False, x))
        if text.shape_buffers:
            buffers += _shape_buffers(text.shape_buffers, name, x)
    for name, x, address in zip(text.outputs, arrays[inputs:], found[inputs:], strict=True):
        buffers.append(_Buffer(name, address, x.nbytes, x.itemsize, True, x))
    return buffers


def _shape_buffers(used: Sequence[str], name: str, x: mx.array) -> list[_Buffer]:
    """The `_shape`, `_strides` and `_ndim` buffers of an input, those that the body uses."""
    buffers: list[_Buffer] = []

    def add(suffix: str, kind: Any, values: Sequence[int]) -> None:
        if name + suffix in used:
            owner = (kind * max(len(values), 1))(*values)
            size = ctypes.sizeof(kind)
            buffers.append(_Buffer(name + suffix, ctypes.addressof(owner), size * len(values), size, False, owner))

    add("_shape", ctypes.c_int, x.shape)
    add("_strides", ctypes.c_int64, [math.prod(x.shape[i + 1 :]) for i in range(x.ndim)])
    add("_ndim", ctypes.c_int, [x.ndim])
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
