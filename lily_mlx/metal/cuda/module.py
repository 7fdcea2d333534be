"""Compiles a kernel before MLX does, and leaves the machine code where MLX looks for it.

MLX compiles a custom kernel once per process, behind headers that take seconds. It looks for
`<module>.ptx` in its cache directory first, but does not write custom kernels there; the module's name ends
in a hash of the kernel's text. So this module builds the same text, compiles the kernel without the slow
headers, and stores the result under that name. Where MLX's text differs (another version) it does not
find the file and compiles by itself: slower, never wrong.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from . import nvrtc

if TYPE_CHECKING:
    from ..cuda_backend import CudaSource

# MLX's names of the types of a kernel's parameters.
TYPES = {
    mx.bool_: "bool", mx.uint8: "uint8_t", mx.int8: "int8_t", mx.uint16: "uint16_t", mx.int16: "int16_t",
    mx.uint32: "uint32_t", mx.int32: "int32_t", mx.uint64: "uint64_t", mx.int64: "int64_t",
    mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.float32: "float",
}  # fmt: skip

_MLX_HEADERS = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
_MLX_NAMESPACE = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"

# What the signature needs of those headers, with the same sizes.
_SHORT_HEADERS = """
using int8_t = signed char; using uint8_t = unsigned char;
using int16_t = short; using uint16_t = unsigned short;
using int32_t = int; using uint32_t = unsigned int;
using int64_t = long; using uint64_t = unsigned long;
struct __nv_bfloat16 { unsigned short x; };
struct __half { unsigned short x; };
namespace cooperative_groups {}
namespace mlx::core::cu {
struct Shape { int values[10]; const int* data() const { return values; } };
struct Strides { long values[10]; const long* data() const { return values; } };
}
"""


def kernel_name(source: CudaSource) -> str:
    """The name that MLX gives a kernel without template arguments."""
    return f"custom_kernel_{source.name}"


def mlx_text(source: CudaSource, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]) -> str:
    """The text that MLX compiles for a kernel."""
    return _MLX_HEADERS + source.header + _MLX_NAMESPACE + _function(source, inputs, output_dtypes)


def short_text(source: CudaSource, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]) -> str:
    """The same kernel without MLX's headers."""
    return _SHORT_HEADERS + source.header + _MLX_NAMESPACE + _function(source, inputs, output_dtypes)


def _function(source: CudaSource, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]) -> str:
    parameters = []
    for name, array in zip(source.inputs, inputs, strict=True):
        parameters.append(f"    const {TYPES[array.dtype]}* {name}")
        for suffix, kind in (("_shape", "Shape"), ("_strides", "Strides"), ("_ndim", "int")):
            if array.ndim > 0 and name + suffix in source.source:
                parameters.append(f"    const __grid_constant__ {kind} {name}{suffix}")
    parameters += [f"    {TYPES[dtype]}* {name}" for name, dtype in zip(source.outputs, output_dtypes, strict=True)]
    return (
        f"__global__ void {kernel_name(source)}(\n"
        + ",\n".join(parameters)
        + ") {\n"
        + source.source
        + "\n}\n\n} // namespace mlx::core::cu\n"
    )


def compile_short(
    source: CudaSource, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], architecture: str
) -> nvrtc.Compiled:
    """Compiles the kernel without MLX's headers; the file at `source.path` must be written.

    Raises:
        CompileError: the compiler rejects the kernel.
    """
    return nvrtc.compile_text(
        short_text(source, inputs, output_dtypes),
        source.name,
        f"mlx::core::cu::{kernel_name(source)}",
        architecture,
    )


def store(
    source: CudaSource,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    architecture: str,
    directory: Path | None = None,
) -> Path:
    """Compiles the kernel into MLX's cache unless it is there. Returns the file.

    Raises:
        CompileError: the compiler rejects the kernel.
        OSError: the cache directory cannot be written.
    """
    text = mlx_text(source, inputs, output_dtypes).encode()
    path = (directory or cache_directory()) / f"{kernel_name(source)}_{hash_bytes(text):x}.ptx"
    if path.exists():
        return path
    compiled = compile_short(source, inputs, output_dtypes, architecture)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path.with_suffix(".txt"), f"mlx::core::cu::{kernel_name(source)}\t{compiled.symbol}\n".encode())
    _write(path, compiled.cubin)
    return path


def _write(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def cache_directory() -> Path:
    """MLX's directory of compiled kernels (MLX_PTX_CACHE_DIR, else in the temporary directory)."""
    chosen = os.environ.get("MLX_PTX_CACHE_DIR")
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / "mlx" / mx.__version__ / "ptx"


@functools.cache
def device_architecture() -> str | None:
    """The architecture of the GPU in NVRTC's words, or None if MLX does not say."""
    info = mx.device_info(mx.gpu)
    major, minor = info.get("compute_capability_major"), info.get("compute_capability_minor")
    if not isinstance(major, int) or not isinstance(minor, int):
        return None
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


_MASK = 2**64 - 1
_MULTIPLIER = 0xC6A4A7935BD1E995


def hash_bytes(data: bytes, seed: int = 0xC70F6907) -> int:
    """libstdc++'s std::hash of a string on 64 bits (MurmurHash64A, Austin Appleby, public domain)."""

    def mixed(value: int) -> int:
        return value ^ (value >> 47)

    result = seed ^ (len(data) * _MULTIPLIER & _MASK)
    whole = len(data) // 8 * 8
    for start in range(0, whole, 8):
        word = int.from_bytes(data[start : start + 8], "little")
        word = mixed(word * _MULTIPLIER & _MASK) * _MULTIPLIER & _MASK
        result = (result ^ word) * _MULTIPLIER & _MASK
    if whole < len(data):
        result = (result ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    return mixed(mixed(result) * _MULTIPLIER & _MASK)
