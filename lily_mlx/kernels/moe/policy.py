"""Launch parameters of the mixture-of-experts kernels.

They follow from static shapes only, never from the routing, which stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from lily_mlx.metal import current_backend

TILE_HEIGHTS = (8, 16, 32, 64)
THREADS = 128  # threads of a grouped matmul's threadgroup: 4 simdgroups


@dataclass(frozen=True)
class GroupedTile:
    """How the 4 simdgroups of a grouped matmul share a tile of ``rows`` x ``columns`` outputs.

    ``simdgroup_rows`` simdgroups stand above each other; the others stand beside them.
    """

    rows: int
    columns: int
    simdgroup_rows: int


def tile_height(tokens: int, top_k: int, experts: int) -> int:
    """Rows of a block, from the average number of rows per expert.

    Tall blocks read the weights fewer times; short ones multiply less padding.
    """
    average = tokens * top_k / experts
    for height in TILE_HEIGHTS[:-1]:
        if average <= height:
            return height
    return TILE_HEIGHTS[-1]


def grouped_tile(height: int) -> GroupedTile:
    """The tile of `grouped_gate_up` and `grouped_down` for blocks of ``height`` rows."""
    return GroupedTile(rows=height, columns=64, simdgroup_rows=2 if height >= 32 else 1)


def sort_threads(pairs: int) -> int:
    """Threads that sort one expert's rows: about 4 to 128 pairs for each thread."""
    return 32 if pairs <= 256 else 128 if pairs <= 4096 else 512


@dataclass(frozen=True)
class RowShape:
    """How a matrix-vector kernel shares out rows: ``lanes`` lanes walk ``rows`` rows together."""

    rows: int
    lanes: int
    simdgroups: int
    block: int  # rows of a threadgroup


# Rows that share the activations in a lane's registers where a row has 32 lanes: in `experts_gate_up` so many
# gate rows and as many up rows, in `experts_down` twice as many as that.
_SHARED_ROWS = {"metal": 4, "cuda": 2, "cpu": 4}


def gate_up_shape(hidden: int) -> RowShape:
    """Shape of `experts_gate_up`, whose gate and up rows have ``hidden`` columns."""
    lanes = _lanes(hidden)
    rows, simdgroups = max(1, _SHARED_ROWS[current_backend()] * lanes // 32), 4
    return RowShape(rows, lanes, simdgroups, simdgroups * rows * 32 // lanes)


def down_shape(intermediate: int, top_k: int) -> RowShape:
    """Shape of `experts_down`, whose rows have ``intermediate`` columns: one simdgroup per slot, up to 16."""
    lanes = _lanes(intermediate)
    rows = max(1, 2 * _SHARED_ROWS[current_backend()] * lanes // 32)
    return RowShape(rows, lanes, min(top_k + 1, 16), rows * 32 // lanes)


def _lanes(columns: int) -> int:
    """Lanes for a row: one for each 32 columns, rounded up to a power of two, at most 32."""
    units = columns // 32
    return min(32, 1 << (units - 1).bit_length())
