"""`QuantizedWeight`: a matrix, or a stack of matrices, in `mx.quantize`'s affine packing, kept in one array.

A weight that is not quantised has the same form with 16 bits: its codes are the bfloat16 values themselves.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import mlx.core as mx

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
BFLOAT16_BITS = 16  # of a weight that is not quantised
NO_GROUPS = 1 << 30  # its group size: larger than any row, so that the kernels' sums give every column group 0
SECTION_WORDS = 4  # a section of a packed weight starts at a multiple of 16 bytes, the kernels' widest load


@dataclass(frozen=True)
class Sections:
    """Where the parts of a packed weight stand, in uint32 words; `metal/include/quantized.h` has the same sums.

    Attributes:
        codes: words of all codes. They start at 0.
        groups: how many scales there are, and as many biases.
        scales: where the scales start.
        biases: where the biases start.
        size: words of the whole array.
    """

    codes: int
    groups: int
    scales: int
    biases: int
    size: int


@functools.lru_cache(maxsize=1024)
def sections_of(rows: int, columns: int, bits: int, group_size: int) -> Sections:
    """The sections of a packed weight.

    Args:
        rows: rows of all matrices of a stack together.
        columns: K, a multiple of the group size.
    """
    codes, groups = rows * (columns // 32 * bits), rows * (columns // group_size)
    scales = _whole_sections(codes)
    if bits == BFLOAT16_BITS:  # one section, which kernels may load and do not use
        return Sections(codes, 0, scales, scales, scales + SECTION_WORDS)
    length = _whole_sections(-(-groups // 2))
    return Sections(codes, groups, scales, scales + length, scales + 2 * length)


def _whole_sections(words: int) -> int:
    return -(-words // SECTION_WORDS) * SECTION_WORDS


@dataclass(frozen=True)
class QuantizedWeight:
    """An affine quantised weight [..., N, K] of N rows (outputs) and K columns (inputs), in one array.

    Element (n, k) is `scales[n, k // group_size] * code(n, k) + biases[n, k // group_size]`. The codes of a
    row are one stream of bits in its words, low bits first. The array holds all codes, then all scales, then all
    biases, each from a multiple of 16 bytes on (`Sections`): a kernel that reads a weight has one input for it, where
    three would cost the host three times as much for every launch.

    With 16 bits the codes are bfloat16 values, without scales and biases.

    Args:
        packed: uint32 [words], as `pack` or `from_bfloat16` makes it.
        shape: (..., N, K).
        bits: bits of a code: 2, 3, 4, 5, 6 or 8, or 16.
        group_size: columns that share a scale and a bias: 32, 64 or 128; NO_GROUPS with 16 bits.

    Raises:
        ValueError: a shape, dtype or parameter that does not fit.
    """

    packed: mx.array
    shape: tuple[int, ...]
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        _check_format(self.bits, self.group_size)
        step = 32 if self.bits == BFLOAT16_BITS else self.group_size
        if len(self.shape) < 2 or self.columns % step:
            raise ValueError(f"a weight of shape {self.shape} has no rows of whole groups of {step}")
        size = self._sections.size
        if self.packed.dtype != mx.uint32 or self.packed.shape != (size,):
            raise ValueError(
                f"a packed weight {self.shape} of {self.bits} bits in groups of {self.group_size} is uint32 [{size}], "
                f"got {self.packed.dtype} {self.packed.shape}; make it with QuantizedWeight.pack"
            )

    @classmethod
    def pack(cls, weight: mx.array, scales: mx.array, biases: mx.array, bits: int, group_size: int) -> QuantizedWeight:
        """A weight from the three arrays of `mx.quantize`, which are copied.

        Args:
            weight: codes, uint32 [..., N, K * bits / 32].
            scales: bfloat16 [..., N, K / group_size].
            biases: bfloat16 [..., N, K / group_size].
            bits: bits of a code: 2, 3, 4, 5, 6 or 8.
            group_size: columns that share a scale and a bias: 32, 64 or 128.

        Raises:
            ValueError: a shape, dtype or parameter that does not fit.
        """
        _check_format(bits, group_size)
        if bits == BFLOAT16_BITS:
            raise ValueError("a weight of 16 bits has no scales and biases; make it with QuantizedWeight.from_bfloat16")
        if weight.dtype != mx.uint32:
            raise ValueError(f"codes must be uint32 words, got {weight.dtype}")
        for name, array in (("scales", scales), ("biases", biases)):
            if array.dtype != mx.bfloat16:
                raise ValueError(f"{name} must be bfloat16, got {array.dtype}; convert them with astype(mx.bfloat16)")
        *lead, words = weight.shape
        columns = words * 32 // bits
        if not lead or words == 0 or words * 32 % bits or columns % group_size:
            raise ValueError(
                f"codes of shape {weight.shape} do not hold rows of whole groups of {group_size} at {bits} bits"
            )
        expected = (*lead, columns // group_size)
        if scales.shape != expected or biases.shape != expected:
            raise ValueError(
                f"codes of shape {weight.shape} need scales and biases of shape {expected}, got "
                f"{scales.shape} and {biases.shape}"
            )
        parts = [_section(array) for array in (weight, scales, biases)]
        return cls(mx.concatenate(parts), (*lead, columns), bits, group_size)

    @classmethod
    def from_bfloat16(cls, values: mx.array) -> QuantizedWeight:
        """A weight that is not quantised, from its values, which are copied.

        Args:
            values: bfloat16 [..., N, K], K a multiple of 32.

        Raises:
            ValueError: wrong shape or dtype.
        """
        if values.dtype != mx.bfloat16 or values.ndim < 2 or values.shape[-1] % 32:
            raise ValueError(
                f"a weight of 16 bits is bfloat16 [..., N, K] with K a multiple of 32, got {values.dtype} {values.shape}"
            )
        parts = [_section(values), mx.zeros(SECTION_WORDS, mx.uint32)]
        return cls(mx.concatenate(parts), tuple(values.shape), BFLOAT16_BITS, NO_GROUPS)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight has codes, scales and biases, and not its values."""
        return self.bits != BFLOAT16_BITS

    @property
    def rows(self) -> int:
        """N, the number of outputs."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """K, the number of inputs."""
        return self.shape[-1]

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimensions of a stack of matrices; none for one matrix."""
        return self.shape[:-2]

    # What is not a kernel of ours takes several arrays. They are views of the packed one, made once.

    @property
    def arrays(self) -> dict[str, mx.array]:
        """The arrays that a layer of mlx.nn has for this weight, by name."""
        if not self.is_quantized:
            return {"weight": self.values}
        return {"weight": self.weight, "scales": self.scales, "biases": self.biases}

    @functools.cached_property
    def values(self) -> mx.array:
        """The values of a weight of 16 bits, bfloat16 [..., N, K], a view.

        Raises:
            ValueError: the weight is quantised.
        """
        if self.is_quantized:
            raise ValueError(f"a weight of {self.bits} bits has codes, not values; use mx.dequantize")
        return self.packed[: self._sections.codes].view(mx.bfloat16).reshape(self.shape)

    @functools.cached_property
    def weight(self) -> mx.array:
        """The codes, uint32 [..., N, K * bits / 32], a view."""
        return self.packed[: self._sections.codes].reshape(*self.shape[:-1], self.columns // 32 * self.bits)

    @functools.cached_property
    def scales(self) -> mx.array:
        """The scales, bfloat16 [..., N, K / group_size], a view."""
        return self._groups(self._sections.scales)

    @functools.cached_property
    def biases(self) -> mx.array:
        """The biases, bfloat16 [..., N, K / group_size], a view."""
        return self._groups(self._sections.biases)

    def _groups(self, start: int) -> mx.array:
        sections = self._sections
        values = self.packed[start : start + sections.biases - sections.scales].view(mx.bfloat16)
        return values[: sections.groups].reshape(*self.shape[:-1], self.columns // self.group_size)

    @property
    def _sections(self) -> Sections:
        return sections_of(math.prod(self.shape[:-1]), self.columns, self.bits, self.group_size)


def _check_format(bits: int, group_size: int) -> None:
    if bits == BFLOAT16_BITS and group_size == NO_GROUPS:
        return
    if bits not in BITS:
        raise ValueError(f"quantised weight of {bits} bits; the kernels take {BITS}")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"quantised weight with groups of {group_size}; the kernels take {GROUP_SIZES}")


def _section(array: mx.array) -> mx.array:
    """The array as uint32 [words], zeros after it up to whole sections."""
    flat = array.reshape(-1)
    missing = -flat.nbytes % (4 * SECTION_WORDS) // flat.itemsize
    return (mx.pad(flat, (0, missing)) if missing else flat).view(mx.uint32)
