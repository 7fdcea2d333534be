"""Mixture-of-experts kernels: those of a decode step here, those of a chunk in `moe_chunk`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import swiglu

from lily_mlx.kernels.linear import reference as linear_reference
from lily_mlx.kernels.moe import (
    experts_down,
    experts_gate_up,
    join_routing,
    reference,
    split_routing,
)
from lily_mlx.model import ModelConfig

from . import moe_chunk
from .case import (
    FLOAT32_LIMIT,
    OURS,
    Case,
    Error,
    Inputs,
    Outputs,
    error,
    exact,
    expert_rows,
    sample,
    take_rows,
    to_float64,
)
from .moe_experts import BFLOAT16, Experts
from .operations import Operations
from .reading import Reading
from .source import Source

SAMPLED_OUTPUTS = 32


@dataclass(frozen=True)
class GateUp(Experts):
    """`experts_gate_up`: norm, choice, gate and up products and SwiGLU of one token."""

    phase: ClassVar[Literal["decode", "prefill"]] = "decode"

    @property
    def name(self) -> str:
        return "moe.experts_gate_up"

    @property
    def shape(self) -> dict[str, int]:
        return self.sizes

    @property
    def bytes(self) -> int:
        return 2 * self.slots * self.matrix_bytes + BFLOAT16 * (
            2 * self.config.hidden_size + self.slots * self.config.expert_size
        )

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        hidden = self.config.hidden_size
        logits = source.logits(1, self.config.experts)
        x, norm = source.normal(1, hidden), source.gain(hidden)
        read = source.integers(self.config.experts, 2 * self.slots)
        # In mlx-lm the router's norm serves the experts too and is counted there.
        normed = mx.fast.rms_norm(x, norm, self.config.norm_eps)
        return {
            "x": x,
            "norm": norm,
            "logits": logits,
            **self.split_logits(logits),
            "normed": normed,
            "read": read,
        }

    def ours(self, inputs: Inputs) -> Outputs:
        c = self.config
        x, norm, logits, weights = (inputs[name] for name in ("x", "norm", "logits", "weights"))
        return list(experts_gate_up(x, norm, logits, weights, c.top_k, c.norm_eps, c.normalise_scores))

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        w, x = inputs["weights"], inputs["normed"]
        experts, scores, shared_score = self.route_chain(operations, inputs)
        chosen = experts[0]
        up = operations.gather_matmul(x, w.up, chosen, is_sorted=False)
        gate = operations.gather_matmul(x, w.gate, chosen, is_sorted=False)
        shared = swiglu(operations.matmul(x, w.shared_gate), operations.matmul(x, w.shared_up))
        return [swiglu(gate, up), chosen, scores[0], shared, shared_score[0]]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        hidden = self.config.hidden_size
        if outputs[0].size < hidden:
            return {}
        return {"x" if arm == OURS else "normed": outputs[0].reshape(1, -1)[:, :hidden]}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        c, w = self.config, inputs["weights"]
        if arm == OURS:
            hidden, experts, scores = (to_float64(x) for x in (outputs[0], *split_routing(outputs[1])))
        else:
            routed, experts, scores, shared, shared_score = (to_float64(output) for output in outputs)
            hidden, scores = np.concatenate([routed, shared]), np.concatenate([scores, shared_score])
        want_experts, want_scores = reference.select_experts(to_float64(inputs["logits"]), c.top_k, c.normalise_scores)
        # The order of the experts of a token is free.
        ours, theirs = np.argsort(experts), np.argsort(want_experts[0])
        if not np.array_equal(experts[ours], want_experts[0][theirs]):
            return [exact("experts", False)]
        normed = linear_reference.rms_norm(to_float64(inputs["x"]), to_float64(inputs["norm"]), c.norm_eps)[0]
        rows = sample(c.expert_size, SAMPLED_OUTPUTS)

        def product(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
            return np.asarray(reference.silu(gate @ normed) * (up @ normed))

        want = []
        for expert in experts[ours]:
            gate, up = (linear_reference.dequantize(expert_rows(m, int(expert), rows)) for m in (w.gate, w.up))
            want.append(product(gate, up))
        want.append(product(*(linear_reference.dequantize(take_rows(m, rows)) for m in (w.shared_gate, w.shared_up))))
        order = [*ours, c.top_k]
        got = mx.array(hidden[order][:, rows].astype(np.float32)).astype(mx.bfloat16)
        got_scores = mx.array(scores[order].astype(np.float32))
        score_error = error("scores", got_scores, want_scores[0][[*theirs, c.top_k]], limit=FLOAT32_LIMIT)
        return [exact("experts", True), error("hidden", got, np.stack(want)), score_error]

    def reading(self, inputs: Inputs) -> Reading | None:
        return Reading(inputs["weights"].gate, inputs["read"])


@dataclass(frozen=True)
class Down(Experts):
    """`experts_down`: the down products of one token, weighted, with the residual."""

    phase: ClassVar[Literal["decode", "prefill"]] = "decode"

    @property
    def name(self) -> str:
        return "moe.experts_down"

    @property
    def shape(self) -> dict[str, int]:
        return self.sizes

    @property
    def bytes(self) -> int:
        return self.slots * self.matrix_bytes + BFLOAT16 * (
            2 * self.config.hidden_size + self.slots * self.config.expert_size
        )

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        c = self.config
        order = mx.argsort(source.uniform(0.0, 1.0, c.experts)).astype(mx.uint32)
        scores = source.uniform(0.02, 0.3, self.slots)
        return {
            "hidden": source.normal(self.slots, c.expert_size, deviation=0.5),
            "experts": mx.contiguous(order[: c.top_k]),
            "scores": scores,
            "routing": join_routing(order[: c.top_k], scores),
            "mlx_lm_scores": scores.astype(mx.bfloat16),
            "residual": source.normal(1, c.hidden_size),
            "read": source.integers(c.experts, self.slots),
        }

    def ours(self, inputs: Inputs) -> Outputs:
        return [experts_down(*(inputs[name] for name in ("hidden", "routing", "weights", "residual")))]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        w, k, hidden, scores = inputs["weights"], self.config.top_k, inputs["hidden"], inputs["mlx_lm_scores"]
        routed = operations.gather_matmul(hidden[:k], w.down, inputs["experts"], is_sorted=False)
        routed = (routed * scores[:k, None]).sum(axis=0, keepdims=True)
        shared = scores[k:, None] * operations.matmul(hidden[k:], w.shared_down)
        return [inputs["residual"] + (routed + shared)]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"residual": outputs[0]}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        w, rows = inputs["weights"], sample(self.config.hidden_size, SAMPLED_OUTPUTS)
        hidden, experts, scores, residual = (
            to_float64(inputs[name]) for name in ("hidden", "experts", "scores", "residual")
        )
        want = residual[0, rows].copy()
        for slot, expert in enumerate(experts):
            matrix = linear_reference.dequantize(expert_rows(w.down, int(expert), rows))
            want += scores[slot] * (matrix @ hidden[slot])
        want += scores[-1] * (linear_reference.dequantize(take_rows(w.shared_down, rows)) @ hidden[-1])
        return [error("out", outputs[0][0, mx.array(rows)], want)]

    def reading(self, inputs: Inputs) -> Reading | None:
        return Reading(inputs["weights"].down, inputs["read"])


def cases(config: ModelConfig, rows: tuple[int, ...]) -> Iterator[Case]:
    """The cases of the family; `rows` are the chunk sizes."""
    yield GateUp(config)
    yield Down(config)
    yield from moe_chunk.cases(config, rows)
