"""NVRTC, NVIDIA's compiler library, through ctypes. It needs no GPU.

MLX's CUDA build brings it in the package `nvidia-cuda-nvrtc`, which can also be installed alone.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CompileError


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        cubin: the machine code.
        ptx: the intermediate text, for tests that look for instructions.
        symbol: the kernel's mangled name.
        log: the compiler's words, with ptxas's figures.
    """

    cubin: bytes
    ptx: str
    symbol: str
    log: str

    @property
    def registers(self) -> int:
        """Registers of one thread."""
        return self._figure(r"Used (\d+) registers")

    @property
    def stack_bytes(self) -> int:
        """Bytes of local memory that one thread uses for arrays that did not fit registers."""
        return self._figure(r"(\d+) bytes stack frame")

    @property
    def spill_bytes(self) -> int:
        """Bytes that one thread stores because registers ran out."""
        return self._figure(r"(\d+) bytes spill stores")

    @property
    def shared_bytes(self) -> int:
        """Bytes of threadgroup memory."""
        return self._figure(r"(\d+) bytes smem")

    def _figure(self, pattern: str) -> int:
        return max((int(value) for value in re.findall(pattern, self.log)), default=0)


@functools.cache
def library() -> ctypes.CDLL | None:
    """NVRTC from the environment's packages or the toolkit, or None if it is not here."""
    for place in _places():
        try:
            # NVRTC opens its companion by name, which works once that is in memory.
            for companion in glob.glob(str(Path(place).parent / "libnvrtc-builtins.so.*")):
                ctypes.CDLL(companion)
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


def _places() -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    roots = [f"{root}/*/lib" for root in (spec.submodule_search_locations or [])] if spec else []
    roots += ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/*/lib"]
    return [place for root in roots for place in sorted(glob.glob(f"{root}/libnvrtc.so.*")) if place[-1].isdigit()]


def compile_text(text: str, name: str, kernel: str, architecture: str, includes: Sequence[str] = ()) -> Compiled:
    """Compiles a CUDA source as MLX does.

    Args:
        text: the source.
        name: its name in messages.
        kernel: the kernel's qualified name.
        architecture: for example "sm_90a".
        includes: directories of headers.

    Raises:
        CompileError: the compiler rejects the text, or NVRTC is missing.
    """
    nvrtc = library()
    if nvrtc is None:
        raise CompileError(f"{name}: NVRTC is not installed; install nvidia-cuda-nvrtc")
    options = [
        "--device-as-default-execution-space",
        f"--gpu-architecture={architecture}",
        "--ptxas-options=-v",
        *(f"--include-path={include}" for include in includes),
    ]
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    if status:
        raise CompileError(f"{name}: nvrtcCreateProgram failed with status {status}")
    try:
        nvrtc.nvrtcAddNameExpression(program, kernel.encode())
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        symbol = ctypes.c_char_p()
        if status or nvrtc.nvrtcGetLoweredName(program, kernel.encode(), ctypes.byref(symbol)):
            raise CompileError(f"{name} does not compile for {architecture}:\n{log}")
        return Compiled(
            _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program),
            _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0").decode(),
            (symbol.value or b"").decode(),
            log,
        )
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of: Callable[..., Any], read: Callable[..., Any], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw
