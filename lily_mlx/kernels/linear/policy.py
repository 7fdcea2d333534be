"""Launch parameters of the linear kernels, from static shapes and the kind of device only."""

from __future__ import annotations

from dataclasses import dataclass

from lily_mlx.metal import current_backend

UNIT = 32  # codes that a lane takes from a row at once
MOST_STAGED_COLUMNS = 8192  # a row of bfloat16 that kernels keep in threadgroup memory: 16 KB


@dataclass(frozen=True)
class DevicePolicy:
    """What depends on the kind of device.

    Decode: up to ``rows`` rows of a weight share the activations in a lane's registers, fewer where the launch
    would have less than ``fill`` simdgroups; ``ahead`` units of each row are loaded before they are used; a
    threadgroup has ``simdgroups`` simdgroups. Prefill: ``tile_heights`` are the heights of the tile: the first
    that covers a chunk is taken, and the last for longer chunks.
    """

    rows: int
    fill: int
    ahead: int
    simdgroups: int
    tile_heights: tuple[int, ...]


DEVICES = {
    "apple": DevicePolicy(rows=4, fill=256, ahead=1, simdgroups=4, tile_heights=(16, 32, 64)),
    "cuda": DevicePolicy(rows=4, fill=1536, ahead=2, simdgroups=4, tile_heights=(16, 32, 64)),
    "cpu": DevicePolicy(rows=4, fill=16, ahead=2, simdgroups=4, tile_heights=(16, 32, 64)),
}


def device_policy() -> DevicePolicy:
    """The policy of the current backend's device."""
    backend = current_backend()
    return DEVICES["apple" if backend == "metal" else backend]


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


def matvec_plan(rows: int, columns: int) -> MatvecPlan:
    """The plan for a weight [rows, columns]: a lane for each 32 columns, at most 32 lanes."""
    device = device_policy()
    units = columns // UNIT
    lanes = min(32, 1 << (units - 1).bit_length())
    shared = device.rows
    while shared > 1 and rows * lanes < device.fill * shared * 32:
        shared //= 2
    steps = -(-units // lanes)
    ahead = max(n for n in range(1, device.ahead + 1) if steps % n == 0)
    return MatvecPlan(max(1, shared * lanes // 32), lanes, ahead, device.simdgroups)


@dataclass(frozen=True)
class MatmulPlan:
    """The tile of a threadgroup of 4 simdgroups: ``rows`` x ``columns`` outputs, ``depth`` of K at a time.

    ``simdgroup_rows`` simdgroups stand above each other; the others stand beside them.
    """

    rows: int
    columns: int
    depth: int
    simdgroup_rows: int

    def template(self) -> dict[str, int]:
        """The plan as template parameters of the kernel."""
        return {
            "BM": self.rows,
            "BN": self.columns,
            "BK": self.depth,
            "SIMDGROUP_ROWS": self.simdgroup_rows,
        }


def matmul_plan(rows: int, columns: int) -> MatmulPlan:
    """The plan for ``rows`` rows of activations with ``columns`` columns."""
    heights = device_policy().tile_heights
    height = next((h for h in heights if rows <= h), heights[-1])
    return MatmulPlan(
        rows=height,
        columns=64,
        depth=64 if columns % 64 == 0 else 32,
        simdgroup_rows=2 if height >= 32 else 1,
    )
