"""Launch parameters of the sampling kernels."""

from __future__ import annotations

from lily_mlx.metal import current_backend

# Threadgroups of the head kernel: enough to fill the device, few enough to share the norm among many rows and
# to let one threadgroup finish the choice.
PARTS = {"metal": 1024, "cuda": 528, "cpu": 64}
MOST_PARTS = 4096
SELECT_SIMDGROUPS = 8
# Tokens of a part of `adjust`, a multiple of its threads: enough parts to fill the device, few enough for the one
# threadgroup of `draw`. On a CPU the threads of a threadgroup take turns, so that fewer are faster.
SLICE = 512
ADJUST_SIMDGROUPS = 4
DRAW_SIMDGROUPS = {"metal": 16, "cuda": 16, "cpu": 4}


def head_parts(blocks: int) -> int:
    """Parts of the vocabulary for ``blocks`` blocks of rows: as few as keep the longest part as short."""
    most = PARTS[current_backend()]
    return -(-blocks // -(-blocks // most))


def draw_simdgroups() -> int:
    """Simdgroups of `draw`."""
    return DRAW_SIMDGROUPS[current_backend()]
