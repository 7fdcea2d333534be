"""Launch parameters of the mixture-of-experts kernels.

They follow from static shapes only, never from the routing, which stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lily_mlx.kernels.linear.policy import ShortPlan
from lily_mlx.metal import current_backend, matrix_engine

TILE_HEIGHTS = (8, 16, 32, 48, 64, 96, 128)

# Up to so many rows and (row, expert) pairs one threadgroup routes a chunk alone.
ONE_LAUNCH_ROWS, ONE_LAUNCH_PAIRS = 64, 1024


@dataclass(frozen=True)
class GroupedTile:
    """How the simdgroups of a grouped matmul share a tile of ``rows`` x ``columns`` outputs, ``depth`` of K at a time.

    ``simdgroup_rows`` simdgroups stand above each other, ``simdgroup_columns`` beside each other. ``ahead`` steps along
    K are on their way in registers.
    """

    rows: int
    columns: int
    depth: int
    simdgroup_rows: int
    simdgroup_columns: int
    ahead: int = 1

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.simdgroup_rows * self.simdgroup_columns

    def template(self) -> dict[str, int]:
        """The tile as template parameters of a kernel."""
        return {
            "BM": self.rows,
            "BN": self.columns,
            "BK": self.depth,
            "SIMD_M": self.simdgroup_rows,
            "SIMD_N": self.simdgroup_columns,
            "AHEAD": self.ahead,
        }


@dataclass(frozen=True)
class GroupedPolicy:
    """Tiles of the grouped matmuls on a kind of device.

    ``spread``: a block's height should cover the average rows of an expert times this. ``gate_up`` and ``down``
    have a tile for each height; `grouped_gate_up` computes ``columns`` gate and as many up outputs. Blocks of few rows
    have a plan in ``short_gate_up`` and ``short_down`` instead; the first has its bands of gate and as many of up.
    ``mlp`` are the tiles of a gated MLP, where all rows have one gate and one up matrix. Where tensor operations
    multiply, `device_policy` has other tiles in these three.
    """

    spread: float
    short_gate_up: tuple[ShortPlan, ...]
    short_down: tuple[ShortPlan, ...]
    gate_up: tuple[GroupedTile, ...]
    down: tuple[GroupedTile, ...]
    mlp: tuple[GroupedTile, ...]


_SHORT_GATE_UP = (ShortPlan(8, 1, 2, 2, 512), ShortPlan(16, 1, 2, 2, 512))
_SHORT_DOWN = (ShortPlan(8, 1, 4, 1, 512), ShortPlan(16, 1, 4, 1, 512))
_TILES = (
    GroupedTile(32, 64, 64, 2, 2),
    GroupedTile(64, 64, 64, 2, 2),
)
_MLP_TILES = (GroupedTile(8, 64, 64, 1, 4), GroupedTile(16, 64, 64, 1, 4), *_TILES)
_CUDA_SHORT_GATE_UP = (
    ShortPlan(16, 1, 2, 2, 512),
    ShortPlan(32, 1, 4, 1, 128, ahead=1, x_ahead=True),
    ShortPlan(48, 1, 4, 1, 128, ahead=1, x_ahead=True),
)
_CUDA_SHORT_DOWN = (
    ShortPlan(16, 1, 4, 1, 512, ahead=4),
    ShortPlan(32, 1, 4, 1, 128, ahead=1, x_ahead=True),
    ShortPlan(48, 1, 4, 1, 128, ahead=1, x_ahead=True),
    ShortPlan(64, 1, 8, 1, 128, ahead=1, x_ahead=True),
)
_CUDA_64, _CUDA_128 = GroupedTile(64, 64, 64, 1, 4), GroupedTile(128, 64, 32, 1, 4)
_CUDA_GATE_UP = (_CUDA_64, GroupedTile(96, 64, 64, 1, 4), _CUDA_128)
_CUDA_DOWN = (GroupedTile(96, 128, 64, 1, 4), GroupedTile(128, 128, 32, 1, 4))
_CUDA_MLP = (GroupedTile(16, 32, 128, 1, 4), GroupedTile(32, 64, 64, 1, 4), _CUDA_64, _CUDA_128)
DEVICES = {
    "metal": GroupedPolicy(1.0, _SHORT_GATE_UP, _SHORT_DOWN, _TILES, _TILES, _MLP_TILES),
    "cpu": GroupedPolicy(1.0, _SHORT_GATE_UP, _SHORT_DOWN, _TILES, _TILES, _MLP_TILES),
    # Matrix instructions multiply 16 rows; a tall block skips the rows that it does not have. A quarter more rows than
    # the average: with blocks of the average, half of the experts would read and dequantise their weights twice.
    "cuda": GroupedPolicy(1.25, _CUDA_SHORT_GATE_UP, _CUDA_SHORT_DOWN, _CUDA_GATE_UP, _CUDA_DOWN, _CUDA_MLP),
}


# For tensor operations: 32 x 32 or 16 x 32 outputs of each matrix for a simdgroup, see `linear.policy`.
TENSOR_TILES = (GroupedTile(32, 64, 64, 2, 2), GroupedTile(64, 64, 64, 2, 2))
TENSOR_MLP_TILES = (GroupedTile(16, 64, 64, 1, 2), *TENSOR_TILES)


def device_policy() -> GroupedPolicy:
    """The policy of the current backend's device and matrix engine."""
    device = DEVICES[current_backend()]
    if matrix_engine() == "tensor":
        return replace(
            device,
            short_gate_up=_below(device.short_gate_up, TENSOR_TILES[0].rows),
            short_down=_below(device.short_down, TENSOR_TILES[0].rows),
            gate_up=TENSOR_TILES,
            down=TENSOR_TILES,
            mlp=TENSOR_MLP_TILES,
        )
    return device


def _below(plans: tuple[ShortPlan, ...], rows: int) -> tuple[ShortPlan, ...]:
    return tuple(plan for plan in plans if plan.rows < rows)


def tile_height(tokens: int, top_k: int, experts: int) -> int:
    """Rows of a block, from the average number of rows per expert.

    Tall blocks read the weights fewer times; short ones multiply less padding.
    """
    policy = device_policy()
    average = tokens * top_k / experts * policy.spread
    heights = [plan.rows for plan in policy.short_gate_up] + [tile.rows for tile in policy.gate_up]
    return next((height for height in heights if average <= height), heights[-1])


def gate_up_tile(height: int, depth: int) -> GroupedTile | ShortPlan:
    """The tile of `grouped_gate_up` for blocks of ``height`` rows, where K is ``depth``."""
    device = device_policy()
    return _fitted(device.short_gate_up, device.gate_up, height, depth)


def down_tile(height: int, depth: int) -> GroupedTile | ShortPlan:
    """The tile of `grouped_down` for blocks of ``height`` rows, where K is ``depth``."""
    device = device_policy()
    return _fitted(device.short_down, device.down, height, depth)


def mlp_tile(rows: int, depth: int) -> GroupedTile:
    """The tile of a gated MLP's gate and up products with ``rows`` rows, where K is ``depth``."""
    tiles = device_policy().mlp
    return _tile(tiles, next((tile.rows for tile in tiles if rows <= tile.rows), tiles[-1].rows), depth)


def _fitted(
    short: tuple[ShortPlan, ...], tiles: tuple[GroupedTile, ...], height: int, depth: int
) -> GroupedTile | ShortPlan:
    """The tile of the next larger height, cut to ``height`` where that can be, with a step that divides ``depth``."""
    for plan in short:
        if height <= plan.rows:
            return plan.for_depth(depth)
    return _tile(tiles, height, depth)


def _tile(tiles: tuple[GroupedTile, ...], height: int, depth: int) -> GroupedTile:
    tile = next((tile for tile in tiles if tile.rows >= height), tiles[-1])
    step = tile.depth if height <= tile.rows else 32  # threadgroup memory holds no more of taller tiles
    while depth % step:
        step //= 2
    fragment = 16 if matrix_engine() == "tensor" else 8
    rows = height if height % (fragment * tile.simdgroup_rows) == 0 else tile.rows
    ahead = max(n for n in range(1, tile.ahead + 1) if depth // step % n == 0)
    return replace(tile, rows=rows, depth=step, ahead=ahead)


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


def gate_up_shape(hidden: int, bits: int = 4) -> RowShape:
    """Shape of `experts_gate_up`, whose gate and up rows have ``hidden`` columns of ``bits`` bits."""
    lanes = _lanes(hidden)
    rows, simdgroups = max(1, _shared_rows(bits) * lanes // 32), 4
    return RowShape(rows, lanes, simdgroups, simdgroups * rows * 32 // lanes)


def down_shape(intermediate: int, top_k: int, bits: int = 4) -> RowShape:
    """Shape of `experts_down`, whose rows have ``intermediate`` columns: one simdgroup per slot, up to 16."""
    lanes = _lanes(intermediate)
    rows = max(1, 2 * _shared_rows(bits) * lanes // 32)
    return RowShape(rows, lanes, min(top_k + 1, 16), rows * 32 // lanes)


def _shared_rows(bits: int) -> int:
    """Half as many rows at a time where their units fill twice as many registers as those of 8 bits."""
    rows = _SHARED_ROWS[current_backend()]
    return rows if bits <= 8 else rows // 2


def _lanes(columns: int) -> int:
    """Lanes for a row: one for each 32 columns, rounded up to a power of two, at most 32."""
    units = columns // 32
    return min(32, 1 << (units - 1).bit_length())
