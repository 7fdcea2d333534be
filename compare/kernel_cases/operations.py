"""The operations that the chains are made of: MLX's own on this device, or MLX's Metal kernels.

What mlx-lm computes by plain operations (residuals, SwiGLU, the convolution, indexing) is the same in both,
MLX's operation on this device. So are RMSNorm and rotary embedding, whose Metal kernels the installed package
has only in compiled form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight

from .. import mlx_kernels
from .case import MLX_METAL, SeparateWeight, UnavailableError

MATMUL_ROWS = 6  # MLX on most Apple GPUs multiplies large matrices row by row for fewer rows
MOST_VECTOR_QUERIES = 8  # of MLX's attention kernel for few queries

Weight = QuantizedWeight | SeparateWeight


class Operations(Protocol):
    """What a chain may call besides plain operations of MLX."""

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        """`mx.fast.rms_norm`."""
        ...

    def rope(self, x: mx.array, dims: int, theta: float, offset: int) -> mx.array:
        """`mx.fast.rope` of x [1, heads, rows, D], its first `dims` dimensions, pairs half of them apart."""
        ...

    def matmul(self, x: mx.array, w: Weight) -> mx.array:
        """`mx.quantized_matmul` of x [M, K] and w [N, K]."""
        ...

    def gather_matmul(self, x: mx.array, w: Weight, experts: mx.array, is_sorted: bool) -> mx.array:
        """`mx.gather_qmm`: row r of x [R or 1, K] by the matrix experts[r] of w [E, N, K], as [R, N]."""
        ...

    def attention(self, q: mx.array, k: mx.array, v: mx.array, length: int, scale: float) -> mx.array:
        """`mx.fast.scaled_dot_product_attention`, causal, of q [1, Hq, M, D] and the first `length` rows of k and v
        [1, Hkv, n, D]; row M - 1 of q is at the last of them."""
        ...

    def softmax(self, x: mx.array) -> mx.array:
        """`mx.softmax` over the last axis, in float32 inside."""
        ...

    def largest(self, x: mx.array, count: int) -> mx.array:
        """Indices of the `count` largest values of each row of x [M, n], in any order."""
        ...

    def gated_delta(
        self, q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """mlx-lm's gated delta rule of [1, T, heads, dim] and a state [1, Hv, Dv, Dk]."""
        ...


class DeviceOperations:
    """MLX's operations as mlx-lm calls them on this device."""

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        return mx.fast.rms_norm(x, weight, eps)

    def rope(self, x: mx.array, dims: int, theta: float, offset: int) -> mx.array:
        return mx.fast.rope(x, dims, traditional=False, base=theta, scale=1.0, offset=offset)

    def matmul(self, x: mx.array, w: Weight) -> mx.array:
        return mx.quantized_matmul(
            x, w.weight, w.scales, w.biases, transpose=True, group_size=w.group_size, bits=w.bits
        )

    def gather_matmul(self, x: mx.array, w: Weight, experts: mx.array, is_sorted: bool) -> mx.array:
        return mx.gather_qmm(
            x[:, None],
            w.weight,
            w.scales,
            w.biases,
            rhs_indices=experts,
            transpose=True,
            group_size=w.group_size,
            bits=w.bits,
            sorted_indices=is_sorted,
        )[:, 0]

    def attention(self, q: mx.array, k: mx.array, v: mx.array, length: int, scale: float) -> mx.array:
        k, v = k[:, :, :length], v[:, :, :length]
        mask = "causal" if q.shape[2] > 1 else None
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    def softmax(self, x: mx.array) -> mx.array:
        return mx.softmax(x, axis=-1, precise=True)

    def largest(self, x: mx.array, count: int) -> mx.array:
        return mx.argpartition(x, kth=-count, axis=-1)[:, -count:]

    def gated_delta(
        self, q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        from mlx_lm.models import gated_delta

        function = gated_delta.gated_delta_kernel if mx.metal.is_available() else gated_delta.gated_delta_ops
        y, state = function(q, k, v, decay, beta, state)
        return y, state


class MetalKernels(DeviceOperations):
    """MLX's Metal kernels, from the installed package, run by our runtime on this device.

    Attributes:
        used: names of the kernels that ran.

    Raises:
        UnavailableError: from a method whose kernel does not exist or is not wrapped.
    """

    def __init__(self) -> None:
        self.used: set[str] = set()

    def matmul(self, x: mx.array, w: Weight) -> mx.array:
        name = "quantized_matvec" if x.shape[0] < MATMUL_ROWS else "quantized_matmul"
        function = self._wrapper(name)
        return function(  # type: ignore[no-any-return]
            x, w.weight, w.scales, w.biases, group_size=w.group_size, bits=w.bits
        )

    def gather_matmul(self, x: mx.array, w: Weight, experts: mx.array, is_sorted: bool) -> mx.array:
        function = self._wrapper("gather_quantized_matmul_sorted" if is_sorted else "gather_quantized_matvec")
        return function(  # type: ignore[no-any-return]
            x, w.weight, w.scales, w.biases, experts, group_size=w.group_size, bits=w.bits
        )

    def attention(self, q: mx.array, k: mx.array, v: mx.array, length: int, scale: float) -> mx.array:
        if q.shape[2] > MOST_VECTOR_QUERIES:
            raise UnavailableError(
                f"MLX has no Metal attention kernel for {q.shape[2]} query rows and heads of {q.shape[3]}"
            )
        return self._wrapper("decode_attention")(q, k, v, scale, length=length)  # type: ignore[no-any-return]

    def softmax(self, x: mx.array) -> mx.array:
        return self._wrapper("softmax")(x)  # type: ignore[no-any-return]

    def largest(self, x: mx.array, count: int) -> mx.array:
        # On Metal MLX sorts the whole row to partition it.
        return self._wrapper("sort")(x, indices=True)[:, -count:]  # type: ignore[no-any-return]

    def gated_delta(
        self, q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        from mlx_lm.models import gated_delta

        from ..mlx_metal import install_gated_delta

        if not hasattr(gated_delta.mx, "_module"):  # not installed yet
            install_gated_delta()
        self.used.add("gated_delta_kernel")
        y, state = gated_delta.gated_delta_kernel(q, k, v, decay, beta, state)
        return y, state

    def fused_gated_delta(
        self, q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The kernel of `mx.fast.gated_delta_update`, which mlx-lm does not call."""
        arguments = [x.astype(q.dtype) for x in (decay, beta)]
        return self._wrapper("gated_delta_update")(q, k, v, *arguments, state)  # type: ignore[no-any-return]

    def _wrapper(self, name: str) -> Callable[..., Any]:
        function = getattr(mlx_kernels, name, None)
        if function is None:
            raise UnavailableError(f"compare.mlx_kernels has no {name}")
        self.used.add(name)
        return function  # type: ignore[no-any-return]


def make_operations(arm: str) -> DeviceOperations:
    """The operations of a baseline, new for each case."""
    return MetalKernels() if arm == MLX_METAL else DeviceOperations()
