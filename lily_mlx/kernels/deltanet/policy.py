"""Launch parameters of the Gated DeltaNet kernels, by backend and number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from lily_mlx.metal import current_backend

SIMD_WIDTH = 32


@dataclass(frozen=True)
class Columns:
    """How simdgroups share the columns of a head's state.

    Attributes:
        lanes: lanes that split the keys of a column, a power of two up to 16.
        columns: columns of each lane.
        simdgroups: simdgroups of a threadgroup.
        ahead: tokens whose loads are under way while as many are computed (`scan` only).
    """

    lanes: int
    columns: int
    simdgroups: int
    ahead: int = 1

    @property
    def part(self) -> int:
        """Columns of a threadgroup; divides the columns of a head."""
        return self.simdgroups * (SIMD_WIDTH // self.lanes) * self.columns


def step_columns(backend: str) -> Columns:
    """Split of `step`.

    On a GPU 4 columns to a simdgroup and 32 to a threadgroup: 1,024 simdgroups for 32 heads, enough loads
    under way to fill the memory system. The CPU backend runs lanes one after another; there a whole column
    for each lane saves the exchange.
    """
    if backend == "cpu":
        return Columns(lanes=1, columns=1, simdgroups=1)
    return Columns(lanes=8, columns=1, simdgroups=8)


def scan_columns(backend: str) -> Columns:
    """Split of `scan`; on a GPU 4 columns to a simdgroup, as in `step`."""
    if backend == "cpu":
        return Columns(lanes=1, columns=1, simdgroups=1)
    return Columns(lanes=8, columns=1, simdgroups=4, ahead=4)


def short_columns(backend: str) -> Columns:
    """Split of `short_chunk` and `batch_step`: a threadgroup holds all columns of a head, for its norm.

    As many lanes as in `scan` and `step`, so that sums are taken in their order.
    """
    if backend == "cpu":
        return Columns(lanes=1, columns=1, simdgroups=4)
    return Columns(lanes=8, columns=2, simdgroups=16)


def short_rows(backend: str) -> int:
    """Up to how many rows a chunk takes `short_chunk` instead of three launches.

    A head's rows are walked through by one threadgroup, where `scan` has eight on a GPU. With few rows the two
    launches that are saved, and what passes through memory between them, count for more. On an H200, of whose 132 cores
    32 heads fill a quarter, 8 rows take 11.8 us instead of 10.9 in three launches, 20 rows 22.5 instead of 15.2, and
    two launches are saved. The 64 rows of Apple's GPUs, which have up to 40 cores, are reasoned and not measured.
    """
    return 16 if backend == "cuda" else 64


def is_short(rows: int) -> bool:
    """Whether a chunk of so many rows takes `short_chunk` on the current backend."""
    return rows <= short_rows(current_backend())


def short_block(rows: int) -> int:
    """Rows that `short_chunk` prepares at once: 16 KB of threadgroup memory, or what one row needs."""
    return 1 if rows == 1 else 16


def prepare_tile(rows: int) -> int:
    """Rows of a tile of `prepare`. Tall tiles read fewer rows twice, short ones fill the GPU sooner."""
    return 4 if rows <= 64 else 16


PREPARE_SIMDGROUPS = 4
NORM_SIMDGROUPS = 8
