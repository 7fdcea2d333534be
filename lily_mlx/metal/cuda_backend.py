"""The `cuda` backend: the same Metal text, given to `mx.fast.cuda_kernel`.

`generate` writes one CUDA file per specialisation of a kernel: the compat headers of `metal/cuda/` (Metal's
types, math, simdgroup operations and matrices), the kernel's headers, and its body inside a device function
with a prologue that defines the template parameters and the attributes. MLX hashes a kernel's text at every
dispatch, so it only gets a few lines that include this file from the cache directory and call the function.

Where NVRTC is at hand the kernel is also compiled here, at its first launch: a compile error is then an error
of that launch, and MLX finds the machine code in its cache (`metal/cuda/module.py`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .cuda import module, nvrtc
from .errors import LaunchError, SourceError
from .launch import Launch, TemplateValue, float_constants
from .source import ATTRIBUTES, SHAPE_SUFFIXES, KernelText, rewrite_threadgroup

COMPAT = Path(__file__).resolve().parent / "cuda"
COMPAT_FILES = ("types.cuh", "math.cuh", "simd.cuh", "matrix.cuh", "tile.cuh")
TENSOR_FILE = "tensor.cuh"  # for kernels that name Metal's tensor operations
CACHE_ENVIRONMENT = "LILY_MLX_CACHE"
MAX_BLOCKS_YZ = 65_535

# Names of the types inside the generated file: Metal's, with our own bfloat and half.
TYPES: Mapping[mx.Dtype, str] = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.int8: "int8_t",
    mx.uint16: "uint16_t",
    mx.int16: "int16_t",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
    mx.uint64: "uint64_t",
    mx.int64: "int64_t",
    mx.float16: "half",
    mx.bfloat16: "bfloat",
    mx.float32: "float",
}

_SHAPE_TYPES = {"_shape": "const int*", "_strides": "const int64_t*", "_ndim": "const int&"}

_SIMDGROUPS = "(LILY_THREADS + 31) / 32"
_ATTRIBUTE_VALUES: Mapping[str, str] = {
    "dispatch_quadgroups_per_threadgroup": "(LILY_THREADS + 3) / 4",
    "dispatch_simdgroups_per_threadgroup": _SIMDGROUPS,
    "dispatch_threads_per_threadgroup": "uint3(LILY_WIDTH, LILY_HEIGHT, LILY_DEPTH)",
    "grid_origin": "uint3(0u)",
    "grid_size": "uint3(gridDim.x * LILY_WIDTH, gridDim.y * LILY_HEIGHT, gridDim.z * LILY_DEPTH)",
    "quadgroup_index_in_threadgroup": "LILY_THREAD / 4",
    "quadgroups_per_threadgroup": "(LILY_THREADS + 3) / 4",
    "simdgroup_index_in_threadgroup": "LILY_THREAD / 32",
    "simdgroups_per_threadgroup": _SIMDGROUPS,
    "thread_execution_width": "32",
    "thread_index_in_quadgroup": "LILY_THREAD % 4",
    "thread_index_in_simdgroup": "LILY_THREAD % 32",
    "thread_index_in_threadgroup": "LILY_THREAD",
    "thread_position_in_grid": "uint3(blockIdx.x * LILY_WIDTH + threadIdx.x, "
    "blockIdx.y * LILY_HEIGHT + threadIdx.y, blockIdx.z * LILY_DEPTH + threadIdx.z)",
    "thread_position_in_threadgroup": "uint3(threadIdx.x, threadIdx.y, threadIdx.z)",
    "threadgroup_position_in_grid": "uint3(blockIdx.x, blockIdx.y, blockIdx.z)",
    "threadgroups_per_grid": "uint3(gridDim.x, gridDim.y, gridDim.z)",
    "threads_per_grid": "uint3(gridDim.x * LILY_WIDTH, gridDim.y * LILY_HEIGHT, gridDim.z * LILY_DEPTH)",
    "threads_per_simdgroup": "32",
    "threads_per_threadgroup": "uint3(LILY_WIDTH, LILY_HEIGHT, LILY_DEPTH)",
}

# Words of Metal that mean nothing in CUDA once the declarations of threadgroup memory are rewritten. They
# are macros only inside the generated file. Helpers are inlined always, because arrays that they take by
# reference live in registers only then.
_KEYWORDS = {
    "device": "",
    "constant": "",
    "thread": "",
    "threadgroup": "",
    "inline": "__forceinline__",
    "METAL_FUNC": "__forceinline__",
}


@dataclass(frozen=True)
class CudaSource:
    """A kernel for `mx.fast.cuda_kernel`.

    `path` is the file that holds `text`; `header` includes it and `source` is the body that MLX wraps.
    `inputs` and `outputs` are the parameter names that MLX writes into the signature.
    """

    name: str
    path: Path
    text: str
    header: str
    source: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


_kernels: dict[str, Any] = {}


def launch(launch: Launch) -> list[mx.array]:
    """Adds the kernel to MLX's graph.

    Raises:
        CompileError: the compiler rejects the kernel's text.
        LaunchError: the grid is larger than CUDA allows.
        SourceError: a dtype has no Metal type.
    """
    kernel = launch.prepared.get("cuda")
    if kernel is None:
        (_, grid_y, grid_z), (_, group_y, group_z) = launch.grid, launch.threadgroup
        if grid_y > MAX_BLOCKS_YZ * group_y or grid_z > MAX_BLOCKS_YZ * group_z:
            raise LaunchError(
                f"kernel {launch.text.name}: the grid {launch.grid} has more than {MAX_BLOCKS_YZ} threadgroups "
                "in y or z, CUDA's limit; put the long dimension in x"
            )
        kernel = launch.prepared["cuda"] = _prepare(launch)
    return kernel(  # type: ignore[no-any-return]
        inputs=launch.inputs,
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=launch.output_shapes,
        output_dtypes=launch.output_dtypes,
    )


def _prepare(launch: Launch) -> Any:
    architecture = module.device_architecture()
    source = generate(launch, architecture)
    if source.name in _kernels:
        return _kernels[source.name]
    write(source)
    if architecture and nvrtc.library():
        # Without a place for the machine code MLX compiles by itself.
        with contextlib.suppress(OSError):
            module.store(source, launch.inputs, launch.output_dtypes, architecture)
    kernel = _kernels[source.name] = mx.fast.cuda_kernel(
        name=source.name,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        source=source.source,
        header=source.header,
    )
    return kernel


def generate(launch: Launch, architecture: str | None = None) -> CudaSource:
    """Translates a kernel for the dtypes, template values and threadgroup of a launch.

    The name holds a hash of everything that decides the machine code, `architecture` included, because MLX
    keeps compiled kernels by name.

    Raises:
        SourceError: a dtype has no Metal type.
    """
    text = launch.text
    scalars = [array.ndim == 0 for array in launch.inputs]
    inputs = [
        (name, _type_name(text, name, array.dtype), scalar)
        for name, array, scalar in zip(text.inputs, launch.inputs, scalars, strict=True)
    ]
    outputs = [
        (name, _type_name(text, name, dtype)) for name, dtype in zip(text.outputs, launch.output_dtypes, strict=True)
    ]
    shapes = {
        (name, suffix): _SHAPE_TYPES[suffix]
        for name, _, scalar in inputs
        for suffix in SHAPE_SUFFIXES
        if name + suffix in text.shape_buffers and not scalar
    }
    parameters = [
        *(f"const {kind}& {name}" if scalar else f"const {kind}* __restrict__ {name}" for name, kind, scalar in inputs),
        *(f"{kind} {name}{suffix}" for (name, suffix), kind in shapes.items()),
        *(f"{kind}* __restrict__ {name}" for name, kind in outputs),
    ]
    arguments = [
        *(
            f"{'*' if scalar else ''}reinterpret_cast<const {_qualified(kind)}*>(in_{name})"
            for name, kind, scalar in inputs
        ),
        *(f"in_{name}{suffix}" + ("" if suffix == "_ndim" else ".data()") for name, suffix in shapes),
        *(f"reinterpret_cast<{_qualified(kind)}*>(out_{name})" for name, kind in outputs),
    ]
    file_text = _file_text(launch, parameters)
    digest = hashlib.sha256("\0".join([file_text, *arguments, architecture or ""]).encode()).hexdigest()[:16]
    name = f"lily_{text.name}_{digest}"
    path = cache_directory() / f"{name}.cuh"
    return CudaSource(
        name=name,
        path=path,
        text=file_text,
        header=f'#include "{path}"\n',
        source=f"#undef __global__\nlily::kernel_body({', '.join(arguments)});",
        inputs=tuple(f"in_{name}" for name, _, _ in inputs),
        outputs=tuple(f"out_{name}" for name, _ in outputs),
    )


def write(source: CudaSource) -> None:
    """Puts the generated file into the cache, whole or not at all.

    Raises:
        LaunchError: the cache directory cannot be written.
    """
    try:
        if source.path.exists() and source.path.read_text() == source.text:
            return
        source.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=source.path.parent, suffix=".tmp", delete=False) as file:
            file.write(source.text)
        os.replace(file.name, source.path)
    except OSError as error:
        raise LaunchError(
            f"cannot write the CUDA source {source.path}: {error.strerror}; set {CACHE_ENVIRONMENT} to a "
            "directory that can be written"
        ) from error


@functools.cache
def cache_directory() -> Path:
    """Where generated CUDA files are kept: LILY_MLX_CACHE, else the user's cache directory."""
    root = os.environ.get(CACHE_ENVIRONMENT)
    if root:
        return Path(root).resolve() / "cuda"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).resolve() / "lily_mlx" / "cuda"


@functools.cache
def compat_text(tensors: bool = False) -> str:
    """The compat headers in order, without comments; `tensors` adds Metal's tensor operations."""
    names = (*COMPAT_FILES, TENSOR_FILE) if tensors else COMPAT_FILES
    return "".join(_uncomment((COMPAT / name).read_text()) for name in names)


def _uncomment(text: str) -> str:
    lines = (re.sub(r"//.*", "", line).rstrip() for line in text.splitlines())
    return "".join(line + "\n" for line in lines if line)


def _type_name(text: KernelText, name: str, dtype: mx.Dtype) -> str:
    kind = TYPES.get(dtype)
    if kind is None:
        raise SourceError(f"kernel {text.name}: array {name} has dtype {dtype}, which Metal kernels do not take")
    return kind


def _qualified(kind: str) -> str:
    return kind if kind in ("bool", "float") else f"lily::{kind}"


def _file_text(launch: Launch, parameters: list[str]) -> str:
    text = launch.text
    width, height, depth = launch.threadgroup
    threads = math.prod(launch.threadgroup)
    linear = (
        "threadIdx.x" if threads == width else "(threadIdx.x + LILY_WIDTH * (threadIdx.y + LILY_HEIGHT * threadIdx.z))"
    )
    attributes = "".join(
        f"  const {ATTRIBUTES[name]} {name} = {_ATTRIBUTE_VALUES[name]};\n" for name in text.attributes
    )
    headers = "".join(f'#line 1 "{_short_path(part.path)}"\n{_translate(part.text)}\n' for part in text.header_parts)
    return (
        f"#define LILY_WIDTH {width}u\n#define LILY_HEIGHT {height}u\n#define LILY_DEPTH {depth}u\n"
        f"#define LILY_THREADS {threads}u\n#define LILY_THREAD {linear}\n"
        + compat_text("mpp::tensor_ops" in text.header)
        + "".join(f"#undef {word}\n#define {word} {meaning}\n" for word, meaning in _KEYWORDS.items())
        + "namespace lily {\n"
        + float_constants(launch.template)
        + headers
        + f'#line 1 "{text.name}: parameters"\n'
        + f"inline void kernel_body(\n    {', '.join(parameters)}) {{\n"
        + _template_prologue(launch.template)
        + attributes
        + f'#line 1 "{_short_path(text.body_part.path)}"\n{_translate(text.body_part.text)}\n'
        + "}\n}\n"
        + "".join(f"#undef {word}\n" for word in _KEYWORDS)
        # The compiler may use as many registers as a threadgroup of this size leaves to a thread.
        + f"#undef __global__\n#define __global__ __attribute__((global)) __launch_bounds__({threads})\n"
    )


def _short_path(path: str) -> str:
    """The path inside the package: two checkouts of one text generate one file."""
    return str(Path(path).relative_to(COMPAT.parents[1])) if path.startswith(str(COMPAT.parents[1])) else path


def _template_prologue(template: Mapping[str, TemplateValue]) -> str:
    lines = []
    for name, value in template.items():
        if isinstance(value, bool):
            lines.append(f"  constexpr bool {name} = {str(value).lower()};\n")
        elif isinstance(value, int):
            lines.append(f"  constexpr int {name} = {value};\n")
        elif isinstance(value, mx.Dtype):
            lines.append(f"  using {name} = {TYPES[value]};\n")
    return "".join(lines)


_UNROLL_FULL = re.compile(r"#\s*pragma\s+clang\s+loop\s+unroll\s*\(\s*(?:full|enable)\s*\)")
_UNROLL_COUNT = re.compile(r"#\s*pragma\s+clang\s+loop\s+unroll_count\s*\(\s*(\w+)\s*\)")
_UNROLL_NOT = re.compile(r"#\s*pragma\s+clang\s+loop\s+unroll\s*\(\s*disable\s*\)")
_METAL_INCLUDE = re.compile(
    r"#\s*include\s*<(?:metal_\w+|MetalPerformancePrimitives/\S+)>|using\s+namespace\s+metal\s*;"
)
_PRAGMA_OPERATOR = re.compile(r'_Pragma\(\s*"([^"]*)"\s*\)')


def _translate(text: str) -> str:
    """The few constructs that macros cannot reach. Lines stay where they are."""
    text = _PRAGMA_OPERATOR.sub(lambda match: _translate_pragma(match.group(1)), text)
    text = _UNROLL_FULL.sub("#pragma unroll", text)
    text = _UNROLL_COUNT.sub(r"#pragma unroll \1", text)
    text = _UNROLL_NOT.sub("#pragma unroll 1", text)
    text = _METAL_INCLUDE.sub("", text)
    return rewrite_threadgroup(text)


def _translate_pragma(content: str) -> str:
    line = "#pragma " + content
    for pattern, replacement in ((_UNROLL_FULL, "#pragma unroll"), (_UNROLL_NOT, "#pragma unroll 1")):
        line = pattern.sub(replacement, line)
    line = _UNROLL_COUNT.sub(r"#pragma unroll \1", line)
    return f'_Pragma("{line.removeprefix("#pragma ")}")'
