"""Rotary frequencies in fixed point, so that angles stay exact at any position."""

from __future__ import annotations

import functools
import math

import mlx.core as mx
import numpy as np


@functools.lru_cache(maxsize=16)
def turns_per_position(rotary_dim: int, theta: float) -> mx.array:
    """How far each pair of dimensions turns per position, as fractions of a full turn in 64-bit fixed point.

    The angle of pair i at position p is ``p * theta**(-2 i / R)``. In float32 that product alone is off by 8e-3
    radians at position 262,143. A kernel multiplies these integers by the position instead: whole turns drop out
    in the integer overflow and the remaining angle, at most half a turn, is exact to about 1e-6 radians.

    Args:
        rotary_dim: R, even (0: nothing rotates).
        theta: base of the frequencies (config ``rope_theta``).

    Returns:
        uint32 [max(R / 2, 4), 2]: high and low word for each pair. (Fewer than 8 elements would arrive in
        another address space on Metal.)
    """
    words = np.zeros((max(rotary_dim // 2, 4), 2), dtype=np.uint32)
    for i in range(rotary_dim // 2):
        fixed = int(theta ** (-2.0 * i / rotary_dim) / (2.0 * math.pi) * 2.0**64)
        words[i] = fixed >> 32, fixed & 0xFFFFFFFF
    return mx.array(words)
