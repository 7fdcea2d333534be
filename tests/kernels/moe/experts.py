"""Random experts for the tests, quantised and dense."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lily_mlx.kernels.moe import ExpertWeights
from lily_mlx.kernels.moe.reference import DenseExperts
from tests.support import quantized


@dataclass(frozen=True)
class Format:
    """Bits and group sizes of the routed and shared matrices, as (bits, group)."""

    gate_up: tuple[int, int] = (4, 64)
    down: tuple[int, int] = (4, 64)
    shared_gate_up: tuple[int, int] = (4, 64)
    shared_down: tuple[int, int] = (4, 64)

    def __str__(self) -> str:
        parts = (self.gate_up, self.down, self.shared_gate_up, self.shared_down)
        return "-".join(f"{bits}g{group}" for bits, group in parts)


UNIFORM = Format()
MIXED = Format((4, 64), (8, 32), (8, 128), (4, 32))
FORMATS = (
    MIXED,
    Format((8, 128), (4, 64), (4, 32), (8, 64)),
    Format((3, 32), (5, 64), (2, 64), (6, 32)),
)


def make_experts(
    generator: np.random.Generator, experts: int, intermediate: int, hidden: int, layout: Format = UNIFORM
) -> tuple[ExpertWeights, DenseExperts]:
    """Random weights in both forms."""
    wide, tall = (experts, intermediate, hidden), (experts, hidden, intermediate)
    pairs = (
        quantized(generator, wide, *layout.gate_up),
        quantized(generator, wide, *layout.gate_up),
        quantized(generator, tall, *layout.down),
        quantized(generator, wide[1:], *layout.shared_gate_up),
        quantized(generator, wide[1:], *layout.shared_gate_up),
        quantized(generator, tall[1:], *layout.shared_down),
    )
    return ExpertWeights(*(pair[0] for pair in pairs)), DenseExperts(*(pair[1] for pair in pairs))
