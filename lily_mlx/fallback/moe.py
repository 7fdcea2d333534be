"""The functions of `lily_mlx.kernels.moe` as MLX operations; arguments and results are described there."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.moe import ExpertWeights, Routing, join_routing, policy, split_routing
from lily_mlx.kernels.moe.routing import block_capacity

from .linear import product, rms_norm

__all__ = [
    "combine",
    "combine_norm",
    "experts_down",
    "experts_gate_up",
    "grouped_down",
    "grouped_gate_up",
    "route",
]


def experts_gate_up(
    x: mx.array,
    norm_weight: mx.array,
    logits: mx.array,
    weights: ExpertWeights,
    top_k: int,
    eps: float,
    normalise: bool,
) -> tuple[mx.array, mx.array]:
    """Norm, expert choice, gate and up projections and SwiGLU of one token."""
    experts, scores = select_experts(logits, top_k, normalise)
    rows = mx.repeat(rms_norm(x, norm_weight, eps), top_k, axis=0)
    hidden = _swiglu(_by_expert(rows, weights.gate, experts[0]), _by_expert(rows, weights.up, experts[0]))
    shared = _swiglu(product(rows[:1], weights.shared_gate), product(rows[:1], weights.shared_up))
    return mx.concatenate([hidden, shared]), join_routing(experts[0], scores[0])


def experts_down(hidden: mx.array, routing: mx.array, weights: ExpertWeights, residual: mx.array) -> mx.array:
    """Down projections of one token's experts, weighted by their scores and added to the residual."""
    experts, scores = split_routing(routing)
    down = mx.concatenate([_by_expert(hidden[:-1], weights.down, experts), product(hidden[-1:], weights.shared_down)])
    total = residual.astype(mx.float32) + mx.sum(scores[:, None] * down, axis=0, keepdims=True)
    return total.astype(mx.bfloat16)


def route(logits: mx.array, top_k: int, normalise: bool, tile_rows: int | None = None) -> Routing:
    """Chooses the experts of each token and groups the tokens by expert."""
    tokens, count = logits.shape[0], logits.shape[1] - 1
    if tile_rows is None:
        tile_rows = policy.tile_height(tokens, top_k, count)
    experts, scores = select_experts(logits, top_k, normalise)
    flat, pairs = experts.reshape(-1), mx.arange(tokens * top_k)
    # Different keys for all pairs, so that the sort need not be stable.
    order = mx.argsort(flat.astype(mx.int64) * (tokens * top_k) + pairs)
    slot_rows = mx.argsort(order).astype(mx.uint32).reshape(tokens, top_k)
    counts = mx.sum(flat[:, None] == mx.arange(count, dtype=mx.uint32), axis=0).astype(mx.int32)
    offsets = mx.concatenate([mx.zeros(1, mx.int32), mx.cumsum(counts)])
    return Routing(
        experts,
        scores,
        offsets.astype(mx.uint32),
        (order // top_k).astype(mx.uint32),
        slot_rows,
        _blocks(counts, offsets, tokens, top_k, tile_rows),
        tile_rows,
    )


def grouped_gate_up(x: mx.array, routing: Routing, weights: ExpertWeights) -> mx.array:
    """Gate and up projections and SwiGLU of every routed row, then of every token for the shared expert."""
    experts, rows = _row_experts(routing), x[routing.row_tokens]
    hidden = _swiglu(_by_expert(rows, weights.gate, experts), _by_expert(rows, weights.up, experts))
    shared = _swiglu(product(x, weights.shared_gate), product(x, weights.shared_up))
    return mx.concatenate([hidden, shared])


def grouped_down(hidden: mx.array, routing: Routing, weights: ExpertWeights) -> mx.array:
    """Down projection of every row by its own expert."""
    pairs = routing.row_tokens.shape[0]
    routed = _by_expert(hidden[:pairs], weights.down, _row_experts(routing))
    return mx.concatenate([routed, product(hidden[pairs:], weights.shared_down)]).astype(mx.bfloat16)


def combine(outputs: mx.array, routing: Routing, residual: mx.array) -> mx.array:
    """The residual plus each token's score-weighted expert outputs."""
    pairs, top_k = routing.row_tokens.shape[0], routing.top_k
    routed, shared = outputs[routing.slot_rows].astype(mx.float32), outputs[pairs:].astype(mx.float32)
    total = residual.astype(mx.float32) + mx.sum(routing.scores[:, :top_k, None] * routed, axis=1)
    return (total + routing.scores[:, top_k:] * shared).astype(mx.bfloat16)


def combine_norm(
    outputs: mx.array, routing: Routing, residual: mx.array, norm_weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """`combine`, and the RMSNorm of its result."""
    out = combine(outputs, routing, residual)
    return out, rms_norm(out, norm_weight, eps)


def select_experts(logits: mx.array, top_k: int, normalise: bool) -> tuple[mx.array, mx.array]:
    """Experts uint32 [M, top_k] by falling logit, the higher id first among equals, and scores [M, top_k + 1]."""
    routed = logits[:, :-1]
    routed = mx.where(mx.isnan(routed), mx.array(-mx.inf), routed)
    ids, left = mx.arange(routed.shape[1]), mx.full(routed.shape, True)
    chosen = []
    for _ in range(top_k):
        best = mx.max(mx.where(left, routed, mx.array(-mx.inf)), axis=-1, keepdims=True)
        expert = mx.max(mx.where(left & (routed == best), ids, mx.array(-1)), axis=-1, keepdims=True)
        left = left & (ids != expert)
        chosen.append(expert)
    experts = mx.concatenate(chosen, axis=-1)
    weights = mx.exp(routed - mx.max(routed, axis=-1, keepdims=True))
    scores = mx.take_along_axis(weights, experts, axis=-1)
    scores = scores / mx.sum(scores if normalise else weights, axis=-1, keepdims=True)
    return experts.astype(mx.uint32), mx.concatenate([scores, mx.sigmoid(logits[:, -1:])], axis=-1)


def _blocks(counts: mx.array, offsets: mx.array, tokens: int, top_k: int, tile_rows: int) -> mx.array:
    """The block map of `Routing`."""
    experts, pairs = counts.shape[0], tokens * top_k
    shared = -(-tokens // tile_rows)
    ends = mx.cumsum((counts + tile_rows - 1) // tile_rows)  # blocks of this expert and those before it
    index = mx.arange(block_capacity(tokens, top_k, experts, tile_rows) - shared, dtype=mx.int32)
    expert = mx.sum(ends[None] <= index[:, None], axis=1).astype(mx.int32)
    is_used, expert = expert < experts, mx.minimum(expert, experts - 1)
    starts = mx.concatenate([mx.zeros(1, mx.int32), ends])[expert]
    done = (index - starts) * tile_rows
    rows = mx.where(is_used, mx.minimum(tile_rows, counts[expert] - done), mx.array(0, mx.int32))
    first = mx.where(is_used, offsets[expert] + done, mx.array(0, mx.int32))
    routed = mx.stack([expert, first, rows, mx.zeros_like(rows)], axis=1)
    start = mx.arange(0, shared * tile_rows, tile_rows, dtype=mx.int32)
    own = mx.stack(
        [mx.full(start.shape, experts), start + pairs, mx.minimum(tile_rows, tokens - start), mx.zeros_like(start)],
        axis=1,
    )
    return mx.concatenate([own.astype(mx.uint32), routed.astype(mx.uint32)])


def _row_experts(routing: Routing) -> mx.array:
    """The expert of every sorted row, uint32 [S]."""
    rows = mx.arange(routing.row_tokens.shape[0], dtype=mx.uint32)
    return mx.sum(routing.offsets[None, 1:] <= rows[:, None], axis=1).astype(mx.uint32)


def _by_expert(x: mx.array, w: QuantizedWeight, experts: mx.array) -> mx.array:
    """Row r of x [R, K] times the matrix experts[r] of w [E, N, K], float32 [R, N]."""
    if not w.is_quantized:
        matrices = w.values.swapaxes(-1, -2).astype(mx.float32)
        return mx.gather_mm(x[:, None].astype(mx.float32), matrices, rhs_indices=experts)[:, 0]
    return mx.gather_qmm(
        x[:, None].astype(mx.float32),
        w.weight,
        w.scales.astype(mx.float32),
        w.biases.astype(mx.float32),
        rhs_indices=experts,
        transpose=True,
        group_size=w.group_size,
        bits=w.bits,
    )[:, 0]


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return (gate * mx.sigmoid(gate) * up).astype(mx.bfloat16)
