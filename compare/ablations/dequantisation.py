"""Without dequantisation inside the grouped matmul: one launch expands the weights, another one reads them."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.moe import ExpertWeights, Routing
from lily_mlx.metal import Kernel
from lily_mlx.model import prefill

from .form import replaced

_HERE = str(Path(__file__).resolve().parent)
_EXPAND = Kernel(
    name="ablation_expand",
    inputs=("weight",),
    outputs=("out",),
    body=f"{_HERE}/expand.metal",
    headers=("metal/include/quantized.h",),
)
_GROUPED = Kernel(
    name="ablation_grouped",
    inputs=("x", "row_tokens", "blocks", "first", "second", "shared_first", "shared_second"),
    outputs=("out",),
    body=f"{_HERE}/grouped.metal",
    headers=(
        "metal/include/fragment.h",
        "metal/include/tile.h",
        "metal/include/quantized.h",
        f"{_HERE}/grouped.h",
    ),
)
_EXPAND_THREADS = 256
_TILE_COLUMNS = 64


def separate_dequantisation() -> AbstractContextManager[None]:
    """All experts of a layer are expanded to bfloat16 in memory before each grouped matmul."""
    return _grouped(expanded=True)


def own_matmul() -> AbstractContextManager[None]:
    """The control: the alternative's matmul, with the weights dequantised inside it."""
    return _grouped(expanded=False)


def _grouped(expanded: bool) -> AbstractContextManager[None]:
    def gate_up(x: mx.array, routing: Routing, weights: ExpertWeights) -> mx.array:
        pairs = ((weights.gate, weights.up), (weights.shared_gate, weights.shared_up))
        return _matmul(x, routing, *pairs, gated=True, expanded=expanded)

    def down(hidden: mx.array, routing: Routing, weights: ExpertWeights) -> mx.array:
        pairs = ((weights.down, weights.down), (weights.shared_down, weights.shared_down))
        return _matmul(hidden, routing, *pairs, gated=False, expanded=expanded)

    return replaced(prefill, grouped_gate_up=gate_up, grouped_down=down)


def expand(w: QuantizedWeight) -> mx.array:
    """A quantised weight [..., N, K] as bfloat16 pairs, uint32 [..., N, K / 2]."""
    rows = math.prod(w.shape[:-1])
    units = rows * w.columns // 32
    (out,) = _EXPAND(
        [w.packed],
        template={"BITS": w.bits, "GROUP": w.group_size, "N": rows, "K": w.columns},
        grid=(-(-units // _EXPAND_THREADS) * _EXPAND_THREADS, 1, 1),
        threadgroup=(_EXPAND_THREADS, 1, 1),
        output_shapes=[(*w.shape[:-1], w.columns // 2)],
        output_dtypes=[mx.uint32],
    )
    return out


def _matmul(
    x: mx.array,
    routing: Routing,
    routed: tuple[QuantizedWeight, QuantizedWeight],
    shared: tuple[QuantizedWeight, QuantizedWeight],
    *,
    gated: bool,
    expanded: bool,
) -> mx.array:
    weights = (*routed, *shared)
    words: dict[int, mx.array] = {}
    for w in weights:
        if id(w) not in words:
            words[id(w)] = expand(w) if expanded else w.packed
    columns, rows = routed[0].columns, routed[0].rows
    (out,) = _GROUPED(
        [
            x,
            routing.row_tokens,
            routing.blocks,
            *(words[id(w)] for w in weights),
        ],
        template={
            "GATED": gated,
            "EXPANDED": expanded,
            "E": routed[0].shape[0],
            "BITS": routed[0].bits,
            "GROUP": routed[0].group_size,
            "SHARED_BITS": shared[0].bits,
            "SHARED_GROUP": shared[0].group_size,
            "K": columns,
            "N": rows,
            "BM": routing.tile_rows,
            "BN": _TILE_COLUMNS,
            "BK": 64 if columns % 64 == 0 and routing.tile_rows <= 64 else 32,  # within 32 KB of tiles
            "SIMD_ROWS": 2 if routing.tile_rows >= 32 else 1,
        },
        grid=(-(-rows // _TILE_COLUMNS) * 128, routing.blocks.shape[0], 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(routing.rows, rows)],
        output_dtypes=[mx.bfloat16],
    )
    return out
