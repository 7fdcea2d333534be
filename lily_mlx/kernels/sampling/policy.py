"""Launch parameters of the sampling kernels."""

from __future__ import annotations

from lily_mlx.metal import current_backend

# Threadgroups of the head kernel: enough to fill the device, few enough to share the norm among many rows and
# to let one threadgroup finish the choice.
PARTS = {"metal": 1024, "cuda": 528, "cpu": 64}
MOST_PARTS = 4096
SELECT_SIMDGROUPS = 8


def head_parts(blocks: int) -> int:
    """Parts of the vocabulary for ``blocks`` blocks of rows: as few as keep the longest part as short."""
    most = PARTS[current_backend()]
    return -(-blocks // -(-blocks // most))
