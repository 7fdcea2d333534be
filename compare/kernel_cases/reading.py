"""A kernel that only reads a matrix-vector kernel's weights, with the same launch shape."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear.weight import SECTION_WORDS, sections_of
from lily_mlx.metal import Kernel

_HERE = Path(__file__).parent
_READ_BYTES = Kernel.from_source(
    "read_bytes",
    ["weight", "matrices", "previous"],
    ["out"],
    (_HERE / "read_bytes.metal").read_text(),
    (_HERE / "read_bytes.h").read_text(),
)


@dataclass(frozen=True)
class LaunchShape:
    """Threadgroups of a launch and the simdgroups of each."""

    threadgroups: int
    simdgroups: int


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[LaunchShape]]:
    """The shapes of all launches of our kernels inside the block."""
    found: list[LaunchShape] = []
    call = Kernel.__call__

    def record(kernel: Kernel, inputs: Any, **launch: Any) -> list[mx.array]:
        threads = math.prod(launch["threadgroup"])
        found.append(LaunchShape(math.prod(launch["grid"]) // threads, -(-threads // 32)))
        return call(kernel, inputs, **launch)

    with mock.patch.object(Kernel, "__call__", record):
        yield found


@dataclass(frozen=True)
class Reading:
    """What a kernel reads.

    Attributes:
        weight: [N, K], or a stack [E, N, K].
        matrices: uint32 [matrices], those of the stack that are read.
    """

    weight: QuantizedWeight
    matrices: mx.array

    @property
    def stack(self) -> int:
        return int(math.prod(self.weight.lead))

    @property
    def bytes(self) -> int:
        w = self.weight
        return int(w.weight.nbytes + w.scales.nbytes + w.biases.nbytes) // self.stack * int(self.matrices.size)


def read(reading: Reading, launch: LaunchShape, previous: mx.array) -> mx.array:
    """Reads the bytes, in whole pieces of 16, in a launch of that shape.

    Args:
        previous: an output of the launch before, for which this one waits.

    Returns:
        uint32, one number for each simdgroup.

    Raises:
        ValueError: matrices of a stack that are not whole pieces of 16 bytes.
    """
    w = reading.weight
    words, groups = w.weight.nbytes // reading.stack, w.scales.nbytes // reading.stack
    if reading.stack > 1 and (words % 16 or groups % 16):
        raise ValueError(f"a matrix of {words} bytes of codes and {groups} of scales; expected multiples of 16")
    sections = sections_of(math.prod(w.shape[:-1]), w.columns, w.bits, w.group_size)
    simdgroups = launch.threadgroups * launch.simdgroups
    slots = math.gcd(reading.matrices.size, simdgroups)
    (out,) = _READ_BYTES(
        [w.packed, reading.matrices, previous],
        template={
            "WORDS": words // 16,
            "GROUPS": groups // 16,
            "SCALES": sections.scales // SECTION_WORDS,
            "BIASES": sections.biases // SECTION_WORDS,
            "MATRICES": reading.matrices.size // slots,
            "BLOCKS": simdgroups // slots,
            "SIMDGROUPS": launch.simdgroups,
        },
        grid=(32 * simdgroups, 1, 1),
        threadgroup=(32 * launch.simdgroups, 1, 1),
        output_shapes=[(simdgroups,)],
        output_dtypes=[mx.uint32],
    )
    return out
