"""Launch parameters of the linear kernels, from static shapes and the kind of device only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lily_mlx.metal import current_backend, matrix_engine

SHORT_BLOCK = 128  # columns of K that a simdgroup of a short product takes at once, DIRECT_COLUMNS in direct.h
UNIT = 32  # codes that a lane takes from a row at once
# A norm and its product are one launch up to so many rows and columns of the product.
NORM_MATMUL_ROWS, NORM_MATMUL_COLUMNS = 64, 1024
MOST_LOADED = 8  # units of codes that a lane of a matrix-vector kernel has under way
MOST_STAGED_COLUMNS = 8192  # a row of bfloat16 that kernels keep in threadgroup memory: 16 KB


@dataclass(frozen=True)
class DevicePolicy:
    """What depends on the kind of device.

    Decode: up to ``rows`` rows of a weight share the activations in a lane's registers, fewer where the launch
    would have less than ``fill`` simdgroups; ``ahead`` units of each row are loaded before they are used; a
    threadgroup has ``simdgroups`` simdgroups, or ``gated_simdgroups`` where they share the work of a gated norm.
    Prefill: up to ``short.rows`` rows the matrix product takes the plan ``short`` where that makes ``fill_short``
    threadgroups; else one of ``tiles``, which fills the device from ``fill_tiles`` threadgroups on, or of
    ``tensor_tiles`` where tensor operations multiply. ``short_norm`` is the plan of a norm and its product in one
    launch.
    """

    rows: int
    fill: int
    ahead: int
    simdgroups: int
    gated_simdgroups: int
    short: ShortPlan
    fill_short: int
    short_norm: ShortPlan
    tiles: tuple[MatmulPlan, ...]
    fill_tiles: int
    tensor_tiles: tuple[MatmulPlan, ...]


@dataclass(frozen=True)
class MatvecPlan:
    """How a matrix-vector kernel shares out the rows of a weight.

    ``lanes`` lanes walk a row, ``rows`` rows at a time, with ``ahead`` units of each loaded in advance; a
    threadgroup of ``simdgroups`` simdgroups covers ``block`` rows.
    """

    rows: int
    lanes: int
    ahead: int
    simdgroups: int

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.simdgroups

    @property
    def block(self) -> int:
        """Rows of the weight that a threadgroup covers at a time."""
        return self.simdgroups * self.rows * 32 // self.lanes

    def blocks(self, rows: int) -> int:
        """Blocks that cover a weight of ``rows`` rows."""
        return -(-rows // self.block)

    def template(self) -> dict[str, int]:
        """The plan as template parameters of a kernel."""
        return {"ROWS": self.rows, "LANES": self.lanes, "AHEAD": self.ahead, "SIMDGROUPS": self.simdgroups}


def matvec_plan(rows: int, columns: int, bits: int = 4) -> MatvecPlan:
    """The plan for a weight [rows, columns] of ``bits`` bits: a lane for each 32 columns, at most 32 lanes.

    Half as many rows at a time where their units fill twice as many registers as those of 8 bits.
    """
    device = device_policy()
    units = columns // UNIT
    lanes = min(32, 1 << (units - 1).bit_length())
    shared = device.rows if bits <= 8 else device.rows // 2
    while shared > 1 and rows * lanes < device.fill * shared * 32:
        shared //= 2
    steps = -(-units // lanes)
    most = max(1, min(device.ahead, (MOST_LOADED if bits <= 8 else MOST_LOADED // 2) // shared))
    ahead = max(n for n in range(1, most + 1) if steps % n == 0)
    return MatvecPlan(max(1, shared * lanes // 32), lanes, ahead, device.simdgroups)


def gated_norm_plan(rows: int, columns: int, bits: int = 4) -> MatvecPlan:
    """`matvec_plan` where each threadgroup computes a gated norm of all ``columns`` columns first."""
    return replace(matvec_plan(rows, columns, bits), simdgroups=device_policy().gated_simdgroups)


@dataclass(frozen=True)
class MatmulPlan:
    """The tile of a threadgroup of the matrix product: ``rows`` x ``columns`` outputs, ``depth`` of K at a time.

    ``across`` (rows, columns, depth) simdgroups share it; those along the depth add up their sums at the end. ``ahead``
    steps along K are on their way in registers: short tiles multiply for less time than a read takes.
    """

    rows: int
    columns: int
    depth: int
    across: tuple[int, int, int]
    ahead: int = 1

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * math.prod(self.across)

    def threadgroups(self, rows: int, columns: int) -> tuple[int, int]:
        """Threadgroups along the columns and the rows of an output [rows, columns]."""
        return -(-columns // self.columns), -(-rows // self.rows)

    def template(self) -> dict[str, int]:
        """The plan as template parameters of the kernel."""
        m, n, k = self.across
        return {"BM": self.rows, "BN": self.columns, "BK": self.depth, "SIMD_M": m, "SIMD_N": n, "SIMD_K": k} | {
            "AHEAD": self.ahead
        }

    def for_depth(self, depth: int) -> MatmulPlan:
        """The plan with the largest power of two of K at a time that divides ``depth``, up to its own."""
        step = self.depth
        while depth % step:
            step //= 2
        m, n, k = self.across
        while step // k < 16:
            n, k = n * 2, k // 2
        ahead = max(n for n in range(1, self.ahead + 1) if depth // step % n == 0)
        return replace(self, depth=step, across=(m, n, k), ahead=ahead)


@dataclass(frozen=True)
class ShortPlan:
    """A product of few rows whose weights stay in registers (``metal/include/direct.h``).

    A threadgroup computes ``rows`` rows and ``16 * bands * across`` columns. A simdgroup dequantises 16 * ``bands``
    rows of the weight for ``1 / slices`` of every ``depth`` columns of K; ``ahead`` of its blocks of 128 columns are on
    their way in registers (a part of those in ``depth``, or the blocks of some such stages), and with ``x_ahead`` the
    next columns of x.
    """

    rows: int
    bands: int
    across: int
    slices: int
    depth: int
    ahead: int = 2
    x_ahead: bool = False

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.across * self.slices

    @property
    def columns(self) -> int:
        """Columns of the output that a threadgroup computes."""
        return 16 * self.bands * self.across

    def template(self) -> dict[str, int]:
        """The plan as template parameters of a kernel."""
        return {
            "TOKENS": self.rows,
            "BANDS": self.bands,
            "SIMD_N": self.across,
            "SIMD_K": self.slices,
            "DEPTH": self.depth,
            "AHEAD": self.ahead,
            "X_AHEAD": self.x_ahead,
        }

    def for_depth(self, depth: int) -> ShortPlan:
        """The plan where K is ``depth``: not more of K at a time than there is, and slices of whole blocks of it."""
        step = min(self.depth, -(-depth // SHORT_BLOCK) * SHORT_BLOCK)
        slices = self.slices
        while step // SHORT_BLOCK % slices:
            slices //= 2
        share = step // SHORT_BLOCK // slices
        most = min(self.ahead, share * -(-depth // step))
        ahead = max(n for n in range(1, most + 1) if share % n == 0 or n % share == 0)
        return replace(self, depth=step, slices=slices, ahead=ahead)


def matmul_plan(rows: int, columns: int, depth: int) -> ShortPlan | MatmulPlan:
    """The plan for an output [rows, columns] that sums over ``depth`` (K).

    Weights in registers for few rows, where that fills the device; else a tile of weights.
    """
    device = device_policy()
    if rows <= device.short.rows and -(-columns // device.short.columns) >= device.fill_short:
        return device.short.for_depth(depth)
    return tile_plan(rows, columns, depth)


def norm_matmul_plan(rows: int, columns: int, depth: int) -> ShortPlan | None:
    """The plan for a norm and its product [rows, columns] in one launch; None: each has its own.

    One launch for few rows and columns: each tile of columns normalises all of its rows again. Blocks of rows beside
    each other share that out, so a plan of few rows serves all.
    """
    if rows > NORM_MATMUL_ROWS or columns > NORM_MATMUL_COLUMNS:
        return None
    return device_policy().short_norm.for_depth(depth)


def tile_plan(rows: int, columns: int, depth: int) -> MatmulPlan:
    """The largest tile that is not taller than needed and fills the device, else the smallest that is not taller."""
    device = device_policy()
    tiles = device.tensor_tiles if matrix_engine() == "tensor" else device.tiles
    fitting = [tile for tile in tiles if tile.rows < 2 * rows] or [tiles[-1]]
    for tile in fitting:
        if math.prod(tile.threadgroups(rows, columns)) >= device.fill_tiles:
            return tile.for_depth(depth)
    return fitting[-1].for_depth(depth)


def norm_simdgroups(columns: int) -> int:
    """Simdgroups that share a row of a norm over ``columns`` columns: 8 columns for each thread, at most 8 of them."""
    return max(1, min(8, columns // 256))


_SHORT = ShortPlan(8, 1, 2, 2, 512)
_SHORT_NORM = ShortPlan(8, 1, 1, 8, 1024)
# Largest first. A simdgroup keeps rows x columns / (32 x simdgroups along them) sums in each lane's registers.
_TILES = (
    MatmulPlan(64, 64, 64, (2, 2, 1)),
    MatmulPlan(32, 64, 64, (2, 2, 1)),
    MatmulPlan(16, 64, 64, (1, 4, 1)),
)
# For tensor operations. A simdgroup multiplies 32 x 32 or 16 x 32 outputs: MPP wants a multiple of 16 on one side, and
# MLX's own kernels for these units are made of 16 x 32 outputs. 64 of K at a time is what MLX and other published
# kernels take. No slices of K: a lane's elements are known to the engine alone.
_TENSOR_TILES = (
    MatmulPlan(64, 64, 64, (2, 2, 1)),
    MatmulPlan(32, 64, 64, (2, 2, 1)),
    MatmulPlan(16, 64, 64, (1, 2, 1)),
)
_CUDA_TILES = (
    MatmulPlan(128, 128, 32, (2, 2, 1)),
    MatmulPlan(64, 64, 64, (2, 2, 1)),
    MatmulPlan(64, 32, 64, (2, 1, 2)),
    MatmulPlan(32, 32, 128, (1, 1, 4), ahead=2),
    MatmulPlan(16, 16, 256, (1, 1, 4), ahead=4),
)
DEVICES = {
    "apple": DevicePolicy(
        rows=4,
        fill=256,
        ahead=1,
        simdgroups=4,
        gated_simdgroups=4,
        short=_SHORT,
        fill_short=1,
        short_norm=_SHORT_NORM,
        tiles=_TILES,
        fill_tiles=64,
        tensor_tiles=_TENSOR_TILES,
    ),
    "cuda": DevicePolicy(
        rows=8,
        fill=1536,
        ahead=2,
        simdgroups=4,
        gated_simdgroups=16,
        short=ShortPlan(16, 1, 2, 4, 512, ahead=1),
        fill_short=200,
        short_norm=ShortPlan(8, 1, 1, 8, 1024, x_ahead=True),
        tiles=_CUDA_TILES,
        fill_tiles=200,
        tensor_tiles=_TENSOR_TILES,
    ),
    "cpu": DevicePolicy(
        rows=4,
        fill=16,
        ahead=2,
        simdgroups=4,
        gated_simdgroups=4,
        short=_SHORT,
        fill_short=1,
        short_norm=_SHORT_NORM,
        tiles=_TILES,
        fill_tiles=2,
        tensor_tiles=_TENSOR_TILES,
    ),
}


def device_policy() -> DevicePolicy:
    """The policy of the current backend's device."""
    backend = current_backend()
    return DEVICES["apple" if backend == "metal" else backend]
