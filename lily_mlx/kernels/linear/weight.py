"""`QuantizedWeight`: a matrix, or a stack of matrices, in `mx.quantize`'s affine packing."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class QuantizedWeight:
    """An affine quantised weight [..., N, K] of N rows (outputs) and K columns (inputs).

    Element (n, k) is `scales[n, k // group_size] * code(n, k) + biases[n, k // group_size]`. The codes of a
    row are one stream of bits in its words, low bits first.

    Args:
        weight: codes, uint32 [..., N, K * bits / 32].
        scales: bfloat16 [..., N, K / group_size].
        biases: bfloat16 [..., N, K / group_size].
        bits: bits of a code: 2, 3, 4, 5, 6 or 8.
        group_size: columns that share a scale and a bias: 32, 64 or 128.

    Raises:
        ValueError: a shape, dtype or parameter that does not fit.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"quantised weight of {self.bits} bits; the kernels take {BITS}")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"quantised weight with groups of {self.group_size}; the kernels take {GROUP_SIZES}")
        if self.weight.dtype != mx.uint32:
            raise ValueError(f"codes must be uint32 words, got {self.weight.dtype}")
        for name, array in (("scales", self.scales), ("biases", self.biases)):
            if array.dtype != mx.bfloat16:
                raise ValueError(f"{name} must be bfloat16, got {array.dtype}; convert them with astype(mx.bfloat16)")
        *lead, words = self.weight.shape
        if not lead or words == 0 or words * 32 % self.bits or self.columns % self.group_size:
            raise ValueError(
                f"codes of shape {self.weight.shape} do not hold rows of whole groups of {self.group_size} "
                f"at {self.bits} bits"
            )
        expected = (*lead, self.columns // self.group_size)
        if self.scales.shape != expected or self.biases.shape != expected:
            raise ValueError(
                f"codes of shape {self.weight.shape} need scales and biases of shape {expected}, got "
                f"{self.scales.shape} and {self.biases.shape}"
            )

    @property
    def rows(self) -> int:
        """N, the number of outputs."""
        return int(self.weight.shape[-2])

    @property
    def columns(self) -> int:
        """K, the number of inputs."""
        return int(self.weight.shape[-1]) * 32 // self.bits
