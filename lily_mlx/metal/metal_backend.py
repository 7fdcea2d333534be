"""The `metal` backend: the kernel's text goes to `mx.fast.metal_kernel` as it is."""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx

from .launch import Launch, float_constants
from .source import KernelText

_kernels: dict[tuple[KernelText, str], Any] = {}


def launch(launch: Launch) -> list[mx.array]:
    """Adds the kernel to MLX's graph."""
    prepared = launch.prepared.get("metal")
    if prepared is None:
        constants = float_constants(launch.template)
        kernel = _kernels.get((launch.text, constants))
        if kernel is None:
            kernel = _kernels[launch.text, constants] = _build(launch.text, constants)
        template = [(n, v) for n, v in launch.template.items() if not isinstance(v, float)]
        prepared = launch.prepared["metal"] = (kernel, template)
    kernel, template = prepared
    return kernel(  # type: ignore[no-any-return]
        inputs=launch.inputs,
        template=template,
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=launch.output_shapes,
        output_dtypes=launch.output_dtypes,
    )


def _build(text: KernelText, constants: str) -> Any:
    # MLX keys compiled kernels by name, so the name holds every constant of the text.
    digest = hashlib.sha256((text.digest + constants).encode()).hexdigest()[:12]
    return mx.fast.metal_kernel(
        name=f"lily_{text.name}_{digest}",
        input_names=list(text.inputs),
        output_names=list(text.outputs),
        source=text.body,
        header=constants + text.header,
    )
