"""`Kernel`: a Metal kernel that runs on Apple GPUs, on NVIDIA GPUs and on the CPU from one text."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import backend as backends
from .errors import SourceError
from .launch import Launch, Size3, TemplateValue
from .source import MAX_THREADGROUP_BYTES, KernelText, SourcePart, make_text, read_text, threadgroup_bytes

PACKAGE = Path(__file__).resolve().parent.parent
MAX_THREADS = 512


class Kernel:
    """A kernel whose computation is written once, in a `.metal` file.

    Args:
        name: the kernel's name, used in messages and profiles.
        inputs: names of the input arrays, in the order of a call.
        outputs: names of the output arrays.
        body: the `.metal` file with the kernel's body, relative to the package.
        headers: files with its helper functions, in order, relative to the package.
        max_threads: most threads of a threadgroup; some Apple GPUs run no more than 896 of a kernel
            that uses many registers, so more than 512 needs a reason.

    The files are read and checked at the first call.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        body: str,
        headers: Sequence[str] = (),
        max_threads: int = MAX_THREADS,
    ):
        self.name = name
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.max_threads = max_threads
        self._files = (PACKAGE / body, tuple(PACKAGE / header for header in headers))
        self._prepared: dict[tuple[object, ...], dict[str, Any]] = {}

    @classmethod
    def from_source(
        cls,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        source: str,
        header: str = "",
        max_threads: int = 1024,
    ) -> Kernel:
        """A kernel from text, with the meaning of `mx.fast.metal_kernel`'s `source` and `header`."""
        kernel = cls(name, inputs, outputs, body="", max_threads=max_threads)
        parts = (SourcePart(f"<{name} header>", header),) if header else ()
        kernel.text = make_text(name, kernel.inputs, kernel.outputs, SourcePart(f"<{name}>", source), parts)
        return kernel

    @functools.cached_property
    def text(self) -> KernelText:
        body, headers = self._files
        return read_text(self.name, self.inputs, self.outputs, body, headers)

    def __repr__(self) -> str:
        return f"Kernel({self.name!r}, inputs={self.inputs}, outputs={self.outputs})"

    def __call__(
        self,
        inputs: Sequence[mx.array],
        *,
        template: Mapping[str, TemplateValue] | None = None,
        grid: Size3,
        threadgroup: Size3,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        backend: str | None = None,
    ) -> list[mx.array]:
        """Launches the kernel.

        Args:
            inputs: one array for each input name.
            template: values of the kernel's template parameters (int, bool, Dtype); a float becomes a
                global constant of that name.
            grid: threads in each dimension, a multiple of `threadgroup`.
            threadgroup: threads of one threadgroup in each dimension.
            output_shapes, output_dtypes: one of each for each output name.
            backend: "metal", "cuda" or "cpu"; the current one if None.

        Returns:
            One new array for each output name; on `metal` and `cuda` a node of MLX's graph.

        Raises:
            SourceError: the launch breaks a rule of Metal or MLX.
            BackendError: the backend is unknown or has no device here.
        """
        template = template or {}
        name = backends.current_backend() if backend is None else backends.require_backend(backend)
        # All that decides the machine code and the checks: arrays' values and shapes do not.
        key = (
            grid,
            threadgroup,
            *template.items(),
            *map(type, template.values()),
            *[getattr(x, "dtype", None) for x in inputs],
            *[getattr(x, "ndim", 0) == 0 for x in inputs],
            *output_dtypes,
            len(output_shapes),
        )
        try:
            prepared = self._prepared.get(key)
        except TypeError as error:
            raise SourceError(
                f"kernel {self.name}: grid, threadgroup and template values must be tuples, numbers and dtypes ({error})"
            ) from error
        launch = Launch(
            self.text,
            inputs,
            template,
            grid,
            threadgroup,
            output_shapes,
            output_dtypes,
            name == "cpu" and backends.is_checked(),
            {} if prepared is None else prepared,
        )
        if prepared is None:
            self._check(launch)
            self._prepared[key] = launch.prepared
        return backends.launcher(name)(launch)

    def _check(self, launch: Launch) -> None:
        if len(launch.inputs) != len(self.inputs):
            raise SourceError(
                f"kernel {self.name} takes {len(self.inputs)} inputs {self.inputs}, got {len(launch.inputs)}"
            )
        if not len(self.outputs) == len(launch.output_shapes) == len(launch.output_dtypes):
            raise SourceError(
                f"kernel {self.name} has {len(self.outputs)} outputs {self.outputs}, got "
                f"{len(launch.output_shapes)} shapes and {len(launch.output_dtypes)} dtypes"
            )
        grid, group = launch.grid, launch.threadgroup
        for size_name, size in (("grid", grid), ("threadgroup", group)):
            if not (isinstance(size, tuple) and len(size) == 3 and all(isinstance(n, int) for n in size)):
                raise SourceError(
                    f"kernel {self.name}: the {size_name} is {size!r}; give three integers, the threads in x, y and z"
                )
            if max(size) >= 2**31:
                raise SourceError(f"kernel {self.name}: the {size_name} {size} has a dimension of 2^31 threads or more")
        if not all(isinstance(dtype, mx.Dtype) for dtype in launch.output_dtypes):
            raise SourceError(f"kernel {self.name}: output_dtypes are {launch.output_dtypes!r}; give MLX dtypes")
        if any(n < 0 for shape in launch.output_shapes for n in shape):
            raise SourceError(f"kernel {self.name}: output_shapes {launch.output_shapes} hold a negative size")
        if any(g < 1 or n < 1 or n % g for n, g in zip(grid, group, strict=True)):
            raise SourceError(
                f"kernel {self.name}: the grid {grid} is not a positive multiple of the threadgroup {group}; "
                "both count threads"
            )
        if math.prod(group) > self.max_threads:
            raise SourceError(
                f"kernel {self.name}: {math.prod(group)} threads in a threadgroup; at most {self.max_threads}"
            )
        self._check_template(launch.template)

    def _check_template(self, template: Mapping[str, TemplateValue]) -> None:
        for name, value in template.items():
            if not isinstance(value, (int, float, mx.Dtype)):
                raise SourceError(
                    f"kernel {self.name}: template value {name}={value!r} must be an int, bool, float or Dtype"
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise SourceError(f"kernel {self.name}: template value {name}={value} must be finite")
        sizes = {name: value.size for name, value in template.items() if isinstance(value, mx.Dtype)}
        used = threadgroup_bytes(self.text, template, sizes)
        if used is not None and used > MAX_THREADGROUP_BYTES:
            raise SourceError(
                f"kernel {self.name}: {used} bytes of threadgroup memory with {dict(template)}; Metal allows "
                f"{MAX_THREADGROUP_BYTES}"
            )
