"""A chunk of tokens through the mixture of experts, after `route`: three launches."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.linear.policy import MOST_STAGED_COLUMNS, ShortPlan, norm_simdgroups
from lily_mlx.metal import Kernel, matrix_engine

from . import policy
from .routing import Routing
from .weights import ExpertWeights, check_array, format_template

_GROUPED_HEADERS = (
    "metal/include/quantized.h",
    "metal/include/operands.h",
    "kernels/moe/experts.h",
    "kernels/moe/grouped.h",
)
_TILE_HEADERS = (
    "metal/include/fragment.h",
    "metal/include/tile.h",
    "metal/include/simdgroup_engine.h",
    *_GROUPED_HEADERS,
)
_TENSOR_HEADERS = ("metal/include/tensor_engine.h", *_GROUPED_HEADERS)
_SHORT_HEADERS = (
    "metal/include/fragment.h",
    "metal/include/tile.h",
    "metal/include/quantized.h",
    "metal/include/direct.h",
    "kernels/moe/experts.h",
)
_GATE_UP = Kernel(
    name="moe_grouped_gate_up",
    inputs=("x", "row_tokens", "blocks", "gate", "up", "shared_gate", "shared_up"),
    outputs=("hidden",),
    body="kernels/moe/grouped_gate_up.metal",
    headers=_TILE_HEADERS,
)
_DOWN = Kernel(
    name="moe_grouped_down",
    inputs=("hidden", "blocks", "down", "shared_down"),
    outputs=("out",),
    body="kernels/moe/grouped_down.metal",
    headers=_TILE_HEADERS,
)
_TENSOR_GATE_UP = Kernel(
    name="moe_tensor_gate_up",
    inputs=_GATE_UP.inputs,
    outputs=_GATE_UP.outputs,
    body="kernels/moe/grouped_gate_up.metal",
    headers=_TENSOR_HEADERS,
)
_TENSOR_DOWN = Kernel(
    name="moe_tensor_down",
    inputs=_DOWN.inputs,
    outputs=_DOWN.outputs,
    body="kernels/moe/grouped_down.metal",
    headers=_TENSOR_HEADERS,
)
_TILED_GATE_UP = {"simdgroup": _GATE_UP, "tensor": _TENSOR_GATE_UP}
_TILED_DOWN = {"simdgroup": _DOWN, "tensor": _TENSOR_DOWN}
_SHORT_GATE_UP = Kernel(
    name="moe_short_gate_up",
    inputs=_GATE_UP.inputs,
    outputs=_GATE_UP.outputs,
    body="kernels/moe/short_gate_up.metal",
    headers=_SHORT_HEADERS,
)
_SHORT_DOWN = Kernel(
    name="moe_short_down",
    inputs=_DOWN.inputs,
    outputs=_DOWN.outputs,
    body="kernels/moe/short_down.metal",
    headers=_SHORT_HEADERS,
)
_COMBINE = Kernel(
    name="moe_combine",
    inputs=("outputs", "slot_rows", "scores", "residual"),
    outputs=("out",),
    body="kernels/moe/combine.metal",
    headers=("metal/include/quantized.h", "kernels/moe/combine.h"),
)
_COMBINE_NORM = Kernel(
    name="moe_combine_norm",
    inputs=("outputs", "slot_rows", "scores", "residual", "norm_weight"),
    outputs=("out", "normed"),
    body="kernels/moe/combine_norm.metal",
    headers=("metal/include/quantized.h", "metal/include/reduce.h", "kernels/moe/combine.h"),
)


def grouped_gate_up(x: mx.array, routing: Routing, weights: ExpertWeights) -> mx.array:
    """Gate and up projections and SwiGLU of every routed row, and of every token for the shared expert.

    Args:
        x: bfloat16 [M, H], normed.
        routing: from `route` for the same M tokens and E experts.
        weights: the block's experts.

    Returns:
        hidden bfloat16 [S + M, I] in the routing's row order, S = M * top_k. The shared expert's rows are the
        last M.

    Raises:
        ValueError: wrong shape or dtype, or a routing made for other sizes.
    """
    _check_routing(routing, weights)
    check_array("x", x, (routing.tokens, weights.hidden), mx.bfloat16)
    tile = policy.gate_up_tile(routing.tile_rows, weights.hidden)
    (hidden,) = (_SHORT_GATE_UP if isinstance(tile, ShortPlan) else _TILED_GATE_UP[matrix_engine()])(
        [x, routing.row_tokens, routing.blocks, *weights.gate_up_arrays()],
        template=_template(weights, tile) | format_template(weights.gate, weights.shared_gate),
        grid=_grid(routing, tile, weights.intermediate),
        threadgroup=(tile.threads, 1, 1),
        output_shapes=[(routing.rows, weights.intermediate)],
        output_dtypes=[mx.bfloat16],
    )
    return hidden


def grouped_down(hidden: mx.array, routing: Routing, weights: ExpertWeights) -> mx.array:
    """Down projection of every row by its own expert.

    Args:
        hidden: bfloat16 [S + M, I], from `grouped_gate_up`.
        routing: from `route`.
        weights: the block's experts.

    Returns:
        bfloat16 [S + M, H].

    Raises:
        ValueError: wrong shape or dtype, or a routing made for other sizes.
    """
    _check_routing(routing, weights)
    check_array("hidden", hidden, (routing.rows, weights.intermediate), mx.bfloat16)
    tile = policy.down_tile(routing.tile_rows, weights.intermediate)
    (out,) = (_SHORT_DOWN if isinstance(tile, ShortPlan) else _TILED_DOWN[matrix_engine()])(
        [hidden, routing.blocks, *weights.down_arrays()],
        template=_template(weights, tile) | format_template(weights.down, weights.shared_down),
        grid=_grid(routing, tile, weights.hidden),
        threadgroup=(tile.threads, 1, 1),
        output_shapes=[(routing.rows, weights.hidden)],
        output_dtypes=[mx.bfloat16],
    )
    return out


def combine(outputs: mx.array, routing: Routing, residual: mx.array) -> mx.array:
    """The residual plus each token's score-weighted expert outputs, in float32 with one rounding.

    Args:
        outputs: bfloat16 [S + M, H], from `grouped_down`.
        routing: from `route`.
        residual: bfloat16 [M, H], H a multiple of 8.

    Returns:
        bfloat16 [M, H].

    Raises:
        ValueError: wrong shape or dtype.
    """
    tokens, hidden = _check_combine(outputs, routing, residual)
    threads = min(256, -(-hidden // 256) * 32)
    (out,) = _COMBINE(
        [outputs, routing.slot_rows, routing.scores, residual],
        template={"TOP_K": routing.top_k},
        grid=(tokens * threads, -(-hidden // (8 * threads)), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(tokens, hidden)],
        output_dtypes=[mx.bfloat16],
    )
    return out


def combine_norm(
    outputs: mx.array, routing: Routing, residual: mx.array, norm_weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """`combine`, and the RMSNorm of its result that the next layer starts with.

    Args:
        outputs, routing, residual: see `combine`; H at most 8,192.
        norm_weight: bfloat16 [H], the norm's gain (`mx.fast.rms_norm`'s weight).
        eps: added to the mean square (config ``rms_norm_eps``).

    Returns:
        The new residual and its norm, bfloat16 [M, H] both.

    Raises:
        ValueError: wrong shape or dtype.
    """
    tokens, hidden = _check_combine(outputs, routing, residual)
    check_array("norm_weight", norm_weight, (hidden,), mx.bfloat16)
    if hidden > MOST_STAGED_COLUMNS:
        raise ValueError(f"residual has {hidden} columns; combine_norm takes at most {MOST_STAGED_COLUMNS}")
    simdgroups = norm_simdgroups(hidden)
    out, normed = _COMBINE_NORM(
        [outputs, routing.slot_rows, routing.scores, residual, norm_weight],
        template={"TOP_K": routing.top_k, "H": hidden, "SIMDGROUPS": simdgroups, "EPS": float(eps)},
        grid=(32 * simdgroups * tokens, 1, 1),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[(tokens, hidden)] * 2,
        output_dtypes=[mx.bfloat16] * 2,
    )
    return out, normed


def _check_combine(outputs: mx.array, routing: Routing, residual: mx.array) -> tuple[int, int]:
    if residual.ndim != 2 or residual.shape[1] % 8:
        raise ValueError(f"residual has shape {residual.shape}; expected [rows, a multiple of 8]")
    tokens, hidden = routing.tokens, int(residual.shape[1])
    check_array("residual", residual, (tokens, hidden), mx.bfloat16)
    check_array("outputs", outputs, (routing.rows, hidden), mx.bfloat16)
    return tokens, hidden


def _check_routing(routing: Routing, weights: ExpertWeights) -> None:
    if routing.offsets.size != weights.experts + 1:
        raise ValueError(
            f"the routing is for {routing.offsets.size - 1} experts and the weights hold {weights.experts}; "
            "route with logits of this block's router"
        )


def _template(weights: ExpertWeights, tile: policy.GroupedTile | ShortPlan) -> dict[str, int]:
    return {"E": weights.experts, "H": weights.hidden, "I": weights.intermediate} | tile.template()


def _grid(routing: Routing, tile: policy.GroupedTile | ShortPlan, columns: int) -> tuple[int, int, int]:
    return (-(-columns // tile.columns) * tile.threads, routing.blocks.shape[0], 1)
