"""The mixture of experts of Qwen3.5/3.6 in plain numpy: the definition that the kernels are tested against.

Everything is float64 and unrounded. One expert is the gated MLP ``down(silu(gate(x)) * up(x))``. A token's
output is the score-weighted sum of its ``top_k`` experts, plus a shared expert that sees every token,
weighted by a sigmoid.

Sources: "GLU Variants Improve Transformer" (Shazeer, 2020) for SwiGLU; "Outrageously Large Neural Networks"
(Shazeer et al., 2017) for the routing; config fields ``num_experts``, ``num_experts_per_tok``,
``norm_topk_prob``, ``moe_intermediate_size``, ``rms_norm_eps``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lily_mlx.kernels.linear.reference import round_bfloat16


@dataclass(frozen=True)
class DenseExperts:
    """Dequantised weights: E experts with hidden size H and intermediate size I, and the shared expert."""

    gate: np.ndarray  # [E, I, H]
    up: np.ndarray  # [E, I, H]
    down: np.ndarray  # [E, H, I]
    shared_gate: np.ndarray  # [I, H]
    shared_up: np.ndarray  # [I, H]
    shared_down: np.ndarray  # [H, I]


@dataclass(frozen=True)
class Routing:
    """Where every (token, slot) pair goes. M tokens, ``S = M * top_k`` pairs, sorted by expert.

    Rows ``S + m`` of the grouped arrays belong to the shared expert.
    """

    experts: np.ndarray  # [M, top_k], by falling logit
    scores: np.ndarray  # [M, top_k + 1], the last one is the shared expert's
    offsets: np.ndarray  # [E + 1], expert e owns the sorted rows offsets[e] to offsets[e + 1]
    row_tokens: np.ndarray  # [S], token of each sorted row
    slot_rows: np.ndarray  # [M, top_k], sorted row of each pair


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return np.asarray(x / (1.0 + np.exp(-x)))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Root mean square normalisation of each row of ``x`` [M, H]."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def select_experts(logits: np.ndarray, top_k: int, normalise: bool) -> tuple[np.ndarray, np.ndarray]:
    """The ``top_k`` largest logits of each row and their probabilities.

    Among equal logits the higher id comes first. NaN counts as minus infinity. ``logits`` is [M, E + 1]; the
    last column is the shared expert's gate. ``normalise``: softmax over the chosen logits, otherwise over all
    of them. Returns experts [M, top_k] and scores [M, top_k + 1].
    """
    routed = np.where(np.isnan(logits[:, :-1]), -np.inf, logits[:, :-1])
    rows, count = routed.shape
    experts = np.zeros((rows, top_k), dtype=np.int64)
    scores = np.zeros((rows, top_k + 1))
    for row in range(rows):
        order = sorted(range(count), key=lambda expert: (routed[row, expert], expert), reverse=True)
        experts[row] = order[:top_k]
        with np.errstate(invalid="ignore"):
            weights = np.exp(routed[row] - routed[row].max())
        chosen = weights[experts[row]]
        scores[row, :top_k] = chosen / (chosen.sum() if normalise else weights.sum())
        scores[row, top_k] = 1.0 / (1.0 + np.exp(-logits[row, count]))
    return experts, scores


def route(logits: np.ndarray, top_k: int, normalise: bool) -> Routing:
    """Choose each token's experts and sort the (token, slot) pairs by expert, stably."""
    experts, scores = select_experts(logits, top_k, normalise)
    flat = experts.reshape(-1)
    order = np.argsort(flat, kind="stable")
    slot_rows = np.zeros(flat.size, dtype=np.int64)
    slot_rows[order] = np.arange(flat.size)
    counts = np.bincount(flat, minlength=logits.shape[1] - 1)
    return Routing(
        experts=experts,
        scores=scores,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        row_tokens=order // top_k,
        slot_rows=slot_rows.reshape(experts.shape),
    )


def experts_gate_up(
    x: np.ndarray,
    norm_weight: np.ndarray,
    logits: np.ndarray,
    weights: DenseExperts,
    top_k: int,
    eps: float,
    normalise: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One token: norm, expert choice, gate and up projections. x [1, H], logits [1, E + 1].

    Returns hidden [top_k + 1, I], experts [top_k] and scores [top_k + 1]; the shared expert is the last slot.
    """
    normed = rms_norm(x, norm_weight, eps)[0]
    experts, scores = select_experts(logits, top_k, normalise)
    hidden = [silu(weights.gate[e] @ normed) * (weights.up[e] @ normed) for e in experts[0]]
    hidden.append(silu(weights.shared_gate @ normed) * (weights.shared_up @ normed))
    return np.stack(hidden), experts[0], scores[0]


def experts_down(
    hidden: np.ndarray, experts: np.ndarray, scores: np.ndarray, weights: DenseExperts, residual: np.ndarray
) -> np.ndarray:
    """One token: residual [1, H] plus the score-weighted down projections of hidden [top_k + 1, I]."""
    out = residual[0].copy()
    for slot, expert in enumerate(experts):
        out += scores[slot] * (weights.down[expert] @ hidden[slot])
    out += scores[-1] * (weights.shared_down @ hidden[-1])
    return np.asarray(out[None])


def grouped_gate_up(x: np.ndarray, routing: Routing, weights: DenseExperts) -> np.ndarray:
    """silu(gate) * up of every sorted row, then of every token by the shared expert: [M, H] -> [S + M, I]."""
    hidden = []
    for expert in range(routing.offsets.size - 1):
        for row in range(routing.offsets[expert], routing.offsets[expert + 1]):
            token = x[routing.row_tokens[row]]
            hidden.append(silu(weights.gate[expert] @ token) * (weights.up[expert] @ token))
    for token in x:
        hidden.append(silu(weights.shared_gate @ token) * (weights.shared_up @ token))
    return np.stack(hidden)


def grouped_down(hidden: np.ndarray, routing: Routing, weights: DenseExperts) -> np.ndarray:
    """Down projection of every row of hidden [S + M, I] by its own expert -> [S + M, H]."""
    pairs = routing.row_tokens.size
    outputs = []
    for expert in range(routing.offsets.size - 1):
        for row in range(routing.offsets[expert], routing.offsets[expert + 1]):
            outputs.append(weights.down[expert] @ hidden[row])
    for row in range(pairs, hidden.shape[0]):
        outputs.append(weights.shared_down @ hidden[row])
    return np.stack(outputs)


def combine(outputs: np.ndarray, routing: Routing, residual: np.ndarray) -> np.ndarray:
    """residual [M, H] plus each token's score-weighted rows of outputs [S + M, H]."""
    tokens, top_k = routing.slot_rows.shape
    out = residual.copy()
    for token in range(tokens):
        for slot in range(top_k):
            out[token] += routing.scores[token, slot] * outputs[routing.slot_rows[token, slot]]
        out[token] += routing.scores[token, top_k] * outputs[tokens * top_k + token]
    return out


def combine_norm(
    outputs: np.ndarray, routing: Routing, residual: np.ndarray, norm_weight: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """`combine`, rounded to bfloat16, and its RMSNorm."""
    out = round_bfloat16(combine(outputs, routing, residual))
    return out, rms_norm(out, norm_weight, eps)
