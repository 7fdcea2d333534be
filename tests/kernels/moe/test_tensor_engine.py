"""The grouped products with tensor operations, against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lily_mlx.kernels.moe import policy, prefill
from lily_mlx.metal import use_matrix_engine
from tests.support import need_tensor_operations

from .experts import Format
from .test_prefill import run

LAYOUT = Format((4, 32), (8, 32), (8, 32), (4, 32))


@pytest.fixture(autouse=True)
def tensors() -> Iterator[None]:
    need_tensor_operations()
    with use_matrix_engine("tensor"):
        yield


@pytest.mark.parametrize(("tokens", "height"), [(33, 32), (70, 64)])
def test_block_heights(tokens: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd numbers of rows and columns, with encodings that differ."""
    launched = []
    for kernels in (prefill._TILED_GATE_UP, prefill._TILED_DOWN):
        kernel = kernels["tensor"]
        monkeypatch.setitem(
            kernels, "tensor", lambda *inputs, k=kernel, **options: launched.append(k.name) or k(*inputs, **options)
        )
    run(tokens, 3, 2, 96, 160, LAYOUT, tile_rows=height)
    assert launched == ["moe_tensor_gate_up", "moe_tensor_down"]


@pytest.mark.slow
@pytest.mark.parametrize("height", policy.TILE_HEIGHTS)
@pytest.mark.parametrize(("intermediate", "hidden"), [(32, 32), (192, 320), (160, 544)])
def test_many_sizes(intermediate: int, hidden: int, height: int) -> None:
    run(45, 4, 2, intermediate, hidden, LAYOUT, tile_rows=height)


@pytest.mark.parametrize("backend", sorted(policy.DEVICES))
@pytest.mark.parametrize("depth", [32, 96, 512, 2048])
def test_tiles(backend: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each simdgroup has a multiple of 16 rows and of 32 columns."""
    monkeypatch.setattr(policy, "current_backend", lambda: backend)
    tiles = [policy.mlp_tile(rows, depth) for rows in (1, 16, 17, 64, 4096)]
    for height in policy.TILE_HEIGHTS:
        tiles += [tile for tile in (policy.gate_up_tile(height, depth), policy.down_tile(height, depth))]
    tiled = [tile for tile in tiles if isinstance(tile, policy.GroupedTile)]
    assert len(tiled) >= 5
    for tile in tiled:
        assert tile.rows // tile.simdgroup_rows % 16 == tile.columns // tile.simdgroup_columns % 32 == 0
        assert depth % tile.depth == tile.depth % 16 == 0
