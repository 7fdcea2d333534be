"""NVRTC without a GPU: compiles generated CUDA text as MLX does, and reads what the compiler made of it."""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from lily_mlx.metal import cuda_backend
from lily_mlx.metal.launch import Launch

ARCHITECTURE = "sm_90a"

# What MLX's own device header gives a kernel: half types, Shape, Strides. With the toolkit's headers the
# real files are included, so that clashes of names are found; without them stand-ins do.
_REAL_PRELUDE = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/limits>
#include <cuda/std/tuple>
#include <cooperative_groups.h>
#define inf cuda::std::numeric_limits<float>::infinity()
namespace mlx::core::cu {
using Shape = cuda::std::array<int, 10>;
using Strides = cuda::std::array<long, 10>;
}
"""
_PRELUDE = """struct __nv_bfloat16 { unsigned short x; };
struct __half { unsigned short x; };
using half = __half;
namespace mlx::core::cu {
struct Shape { int values[10]; const int* data() const { return values; } };
struct Strides { long values[10]; const long* data() const { return values; } };
}
"""
_CUDA_TYPES = {
    mx.bool_: "bool", mx.uint8: "unsigned char", mx.int8: "signed char", mx.uint16: "unsigned short",
    mx.int16: "short", mx.uint32: "unsigned int", mx.int32: "int", mx.uint64: "unsigned long",
    mx.int64: "long", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.float32: "float",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: its PTX, and ptxas's figures for the registers and bytes of one thread."""

    ptx: str
    log: str

    @functools.cached_property
    def registers(self) -> int:
        return int(self._figure(r"Used (\d+) registers"))

    @property
    def stack_bytes(self) -> int:
        return int(self._figure(r"(\d+) bytes stack frame"))

    @property
    def spill_bytes(self) -> int:
        return int(self._figure(r"(\d+) bytes spill stores"))

    @property
    def shared_bytes(self) -> int:
        return int(self._figure(r"(\d+) bytes smem", "0"))

    def _figure(self, pattern: str, default: str | None = None) -> str:
        found = re.findall(pattern, self.log)
        if not found and default is None:
            raise AssertionError(f"no {pattern!r} in the compiler's log:\n{self.log}")
        return found[-1] if found else str(default)


@functools.cache
def library() -> ctypes.CDLL | None:
    """NVRTC from the environment's packages or the toolkit, or None."""
    places = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        places += glob.glob(f"{root}/*/lib/libnvrtc.so.*")
    places += glob.glob("/usr/local/cuda*/lib64/libnvrtc.so.*")
    places += glob.glob("/usr/local/cuda*/targets/*/lib/libnvrtc.so.*")
    for place in sorted(p for p in places if "alt" not in p):
        try:
            # NVRTC opens its companion by name, which works if it is in memory already.
            for companion in glob.glob(str(Path(place).parent / "libnvrtc-builtins.so.*")):
                ctypes.CDLL(companion)
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


@functools.cache
def toolkit_include() -> str | None:
    """The toolkit's headers, if they are here."""
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and (Path(home) / "include" / "cuda_bf16.h").exists():
            return str(Path(home) / "include")
    return None


def module_text(source: cuda_backend.CudaSource, launch: Launch) -> str:
    """The text that MLX builds around a kernel's header and source."""
    parameters = []
    for name, array in zip(source.inputs, launch.inputs, strict=True):
        parameters.append(f"const {_CUDA_TYPES[array.dtype]}* {name}")
        for suffix, kind in (("_shape", "Shape"), ("_strides", "Strides"), ("_ndim", "int")):
            if array.ndim and name + suffix in source.source:
                parameters.append(f"const __grid_constant__ {kind} {name}{suffix}")
    for name, dtype in zip(source.outputs, launch.output_dtypes, strict=True):
        parameters.append(f"{_CUDA_TYPES[dtype]}* {name}")
    return (
        (_REAL_PRELUDE if toolkit_include() else _PRELUDE)
        + source.header
        + "namespace mlx::core::cu {\n\n__global__ void custom_kernel(\n"
        + ",\n".join(parameters)
        + f") {{\n{source.source}\n}}\n\n}} // namespace mlx::core::cu\n"
    )


def compile_launch(launch: Launch) -> Compiled:
    """Generates and compiles a launch's kernel.

    Raises:
        AssertionError: with the compiler's words.
    """
    source = cuda_backend.generate(launch)
    cuda_backend.write(source)
    return compile_text(module_text(source, launch), source.name)


def compile_text(text: str, name: str) -> Compiled:
    nvrtc = library()
    assert nvrtc is not None
    include = toolkit_include()
    options = [
        "--device-as-default-execution-space",
        f"--gpu-architecture={ARCHITECTURE}",
        "--ptxas-options=-v",
        *([f"--include-path={include}", f"--include-path={include}/cccl"] if include else []),
    ]
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None
    )
    assert status == 0, f"nvrtcCreateProgram failed: {status}"
    try:
        nvrtc.nvrtcAddNameExpression(program, b"mlx::core::cu::custom_kernel")
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), array)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if status != 0:
            raise AssertionError(f"{name} does not compile:\n{log}")
        lowered = ctypes.c_char_p()
        status = nvrtc.nvrtcGetLoweredName(program, b"mlx::core::cu::custom_kernel", ctypes.byref(lowered))
        assert status == 0, f"{name}: MLX would not find the kernel by its name"
        return Compiled(_text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program), log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_function, function, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    size_function(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value + 1)
    function(program, buffer)
    return buffer.value.decode()
