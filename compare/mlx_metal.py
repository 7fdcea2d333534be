"""mlx-lm's own Metal kernels, run through our runtime where MLX has none for the device.

mlx-lm has no CUDA kernel for Gated DeltaNet and falls back to one graph step per token. A baseline like
that would flatter us, so the arm `mlx_lm+metal` runs mlx-lm's Metal text by the same runtime as ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from lily_mlx.metal import Kernel


class _Proxy:
    """A module with some of its attributes replaced."""

    def __init__(self, module: Any, **replaced: Any):
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def kernel_function(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    **_: Any,
) -> Any:
    """What `mx.fast.metal_kernel` returns, on our runtime."""
    kernel = Kernel.from_source(name, input_names, output_names, source, header)

    def call(*, inputs: Sequence[Any], template: Any = (), **launch: Any) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else _scalar(x) for x in inputs]
        return kernel(arrays, template=dict(template), **launch)

    return call


_scalars: dict[tuple[type, Any], mx.array] = {}


def _scalar(value: Any) -> mx.array:
    key = (type(value), value)
    if key not in _scalars:
        _scalars[key] = mx.array(value)
    return _scalars[key]


def install_gated_delta() -> None:
    """Makes mlx-lm's Gated DeltaNet use its Metal kernels on this device, in this process."""
    from mlx_lm.models import gated_delta

    gated_delta.mx = _Proxy(
        mx,
        fast=_Proxy(mx.fast, metal_kernel=kernel_function),
        metal=_Proxy(mx.metal, is_available=lambda: True),
        default_device=lambda: mx.gpu,
    )
    gated_delta._gated_delta_kernel = gated_delta._make_gated_delta_kernel()
    gated_delta._gated_delta_kernel_packed = gated_delta._make_gated_delta_packed_kernel()
