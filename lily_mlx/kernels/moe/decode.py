"""One token through the mixture of experts: two launches after the router's."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.metal import Kernel

from . import policy
from .routing import check_logits
from .weights import ExpertWeights, check_array, format_template

_GATE_UP = Kernel(
    name="moe_experts_gate_up",
    inputs=("x", "norm_weight", "logits", "gate", "up", "shared_gate", "shared_up"),
    outputs=("hidden", "routing"),
    body="kernels/moe/experts_gate_up.metal",
    headers=(
        "metal/include/quantized.h",
        "metal/include/reduce.h",
        "kernels/moe/select.h",
        "kernels/moe/experts.h",
    ),
)
_DOWN = Kernel(
    name="moe_experts_down",
    inputs=("hidden", "routing", "residual", "down", "shared_down"),
    outputs=("out",),
    body="kernels/moe/experts_down.metal",
    headers=("metal/include/quantized.h", "kernels/moe/experts.h"),
)


def experts_gate_up(
    x: mx.array,
    norm_weight: mx.array,
    logits: mx.array,
    weights: ExpertWeights,
    top_k: int,
    eps: float,
    normalise: bool,
) -> tuple[mx.array, mx.array]:
    """Norm, expert choice, gate and up projections and SwiGLU of one token.

    Args:
        x: bfloat16 [1, H], before the norm.
        norm_weight: bfloat16 [H], the RMSNorm's gain.
        logits: float32 [1, E + 1], the router's logits and, last, the shared expert's gate.
        weights: the block's experts.
        top_k: routed experts (config ``num_experts_per_tok``).
        eps: the RMSNorm's epsilon (config ``rms_norm_eps``).
        normalise: softmax over the chosen experts instead of over all (config ``norm_topk_prob``).

    Returns:
        hidden bfloat16 [top_k + 1, I]; routing uint32 [2 * top_k + 1], the experts by falling logit and the bits of
        their scores, see `split_routing`. The shared expert is the last slot.

    Raises:
        ValueError: wrong shape or dtype, or top_k out of range.
    """
    hidden, intermediate = weights.hidden, weights.intermediate
    experts = check_logits(logits, top_k)
    check_array("x", x, (1, hidden), mx.bfloat16)
    check_array("norm_weight", norm_weight, (hidden,), mx.bfloat16)
    check_array("logits", logits, (1, weights.experts + 1), mx.float32)
    shape = policy.gate_up_shape(hidden, max(weights.gate.bits, weights.shared_gate.bits))
    blocks = -(-intermediate // shape.block)
    out, routing = _GATE_UP(
        [x, norm_weight, logits, *weights.gate_up_arrays()],
        template={
            "E": experts,
            "TOP_K": top_k,
            "PER_LANE": -(-experts // 32),
            "NORMALISE": bool(normalise),
            "H": hidden,
            "I": intermediate,
            **format_template(weights.gate, weights.shared_gate),
            "ROWS": shape.rows,
            "LANES": shape.lanes,
            "SIMDGROUPS": shape.simdgroups,
            "EPS": float(eps),
        },
        grid=(32 * shape.simdgroups * blocks, top_k + 1, 1),
        threadgroup=(32 * shape.simdgroups, 1, 1),
        output_shapes=[(top_k + 1, intermediate), (2 * top_k + 1,)],
        output_dtypes=[mx.bfloat16, mx.uint32],
    )
    return out, routing


def join_routing(experts: mx.array, scores: mx.array) -> mx.array:
    """Experts uint32 [top_k] and scores float32 [top_k + 1] in one array, as the decode kernels hand them on.

    One output of a launch costs the host less than two.
    """
    return mx.concatenate([experts, scores.view(mx.uint32)])


def split_routing(routing: mx.array) -> tuple[mx.array, mx.array]:
    """Experts uint32 [top_k] and scores float32 [top_k + 1], the shared expert's last, of `experts_gate_up`."""
    top_k = routing.size // 2
    return routing[:top_k], routing[top_k:].view(mx.float32)


def experts_down(hidden: mx.array, routing: mx.array, weights: ExpertWeights, residual: mx.array) -> mx.array:
    """Down projections of one token's experts, weighted by their scores and added to the residual.

    Args:
        hidden: bfloat16 [top_k + 1, I], from `experts_gate_up`, as is the next one.
        routing: uint32 [2 * top_k + 1], the experts and the bits of their scores.
        weights: the block's experts.
        residual: bfloat16 [1, H].

    Returns:
        bfloat16 [1, H].

    Raises:
        ValueError: wrong shape or dtype.
    """
    top_k = routing.size // 2
    if not 1 <= top_k <= weights.experts:
        raise ValueError(f"routing holds {top_k} experts; expected 1 to {weights.experts}")
    check_array("hidden", hidden, (top_k + 1, weights.intermediate), mx.bfloat16)
    check_array("routing", routing, (2 * top_k + 1,), mx.uint32)
    check_array("residual", residual, (1, weights.hidden), mx.bfloat16)
    shape = policy.down_shape(weights.intermediate, top_k, max(weights.down.bits, weights.shared_down.bits))
    blocks = -(-weights.hidden // shape.block)
    (out,) = _DOWN(
        [hidden, routing, residual, *weights.down_arrays()],
        template={
            "E": weights.experts,
            "TOP_K": top_k,
            "H": weights.hidden,
            "I": weights.intermediate,
            **format_template(weights.down, weights.shared_down),
            "ROWS": shape.rows,
            "LANES": shape.lanes,
            "SIMDGROUPS": shape.simdgroups,
        },
        grid=(32 * shape.simdgroups * blocks, 1, 1),
        threadgroup=(32 * shape.simdgroups, 1, 1),
        output_shapes=[(1, weights.hidden)],
        output_dtypes=[mx.bfloat16],
    )
    return out
