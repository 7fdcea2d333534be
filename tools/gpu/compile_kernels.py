"""Compiles for an NVIDIA GPU, without one, every kernel that a test run launches.

    python tools/gpu/compile_kernels.py [--run] [pytest arguments, tests/kernels if none]

Each specialisation is one line: registers, local memory, spills and threadgroup memory. Without `--run`
the kernels do not run (outputs are zeros and the tests' own results mean nothing), which is enough to compile
them.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lily_mlx.metal import backend as backends
from lily_mlx.metal import cuda_backend
from lily_mlx.metal.cuda import module
from lily_mlx.metal.errors import CompileError, KernelError
from lily_mlx.metal.launch import Launch

ARCHITECTURE = "sm_90a"


class Recorder:
    """A pytest plugin that compiles each new launch."""

    def __init__(self, run: bool):
        self.run = run
        self.seen: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.original = backends.launcher
        backends.launcher = self.launcher
        if not run:
            # Kernels choose tile sizes by the backend's name: take those of `cuda`, though it has no device.
            backends.require_backend = lambda name, origin=None: name

    def launcher(self, name: str):
        def launch(request: Launch) -> list[mx.array]:
            self.compile(request)
            if self.run:
                return self.original(name)(request)
            shapes = zip(request.output_shapes, request.output_dtypes, strict=True)
            return [mx.zeros(tuple(shape), dtype) for shape, dtype in shapes]

        return launch

    def compile(self, request: Launch) -> None:
        source = cuda_backend.generate(request, ARCHITECTURE)
        if source.name in self.seen:
            return
        template = " ".join(
            f"{name}={str(value).removeprefix('mlx.core.')}" for name, value in request.template.items()
        )
        label = f"{request.text.name} x{math.prod(request.threadgroup)} [{template}]"
        self.seen[source.name] = label
        cuda_backend.write(source)
        try:
            compiled = module.compile_short(source, request.inputs, request.output_dtypes, ARCHITECTURE)
        except CompileError as error:
            self.failures[label] = str(error)
            print(f"FAIL {label}\n{error}", flush=True)
            return
        ptx = compiled.ptx
        print(
            f"ok   regs {compiled.registers:3d} local {compiled.stack_bytes:5d} "
            f"spill {compiled.spill_bytes:4d} shared {compiled.shared_bytes:5d} "
            f"mma {ptx.count('mma.sync'):3d} ldmatrix {ptx.count('ldmatrix'):3d} "
            f"v4 {ptx.count('ld.global.v4') + ptx.count('ld.global.nc.v4'):3d}  {label}",
            flush=True,
        )


def main() -> int:
    arguments = sys.argv[1:]
    run = "--run" in arguments
    arguments = [argument for argument in arguments if argument != "--run"] or ["tests/kernels"]
    recorder = Recorder(run)
    backend = "cpu" if run else "cuda"
    options = [
        "-q",
        "-s",
        "--no-header",
        "--tb=no",
        "--no-summary",
        "-p",
        "no:cacheprovider",
        "--backend",
        backend,
    ]
    try:
        pytest.main([*options, *arguments], plugins=[recorder])
    except KernelError as error:
        print(error)
    print(f"{len(recorder.seen)} kernels, {len(recorder.failures)} do not compile")
    for label in recorder.failures:
        print("  " + label)
    return 1 if recorder.failures else 0


if __name__ == "__main__":
    sys.exit(main())
