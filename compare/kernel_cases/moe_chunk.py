"""Mixture-of-experts kernels of a prefill chunk: routing, grouped products, combination."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import swiglu

from lily_mlx.kernels.linear import reference as linear_reference
from lily_mlx.kernels.moe import (
    combine_norm,
    grouped_down,
    grouped_gate_up,
    reference,
    route,
)
from lily_mlx.model import ModelConfig

from .case import (
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
from .source import Source

SAMPLED_OUTPUTS = 32
SAMPLED_ROWS = 12


@dataclass(frozen=True)
class _Chunk(Experts):
    rows: int

    phase: ClassVar[Literal["decode", "prefill"]] = "prefill"

    @property
    def calls_per_step(self) -> int:
        return self.config.layers - 1  # the last layer serves one row

    @property
    def shape(self) -> dict[str, int]:
        return {"rows": self.rows, **self.sizes}

    @property
    def pairs(self) -> int:
        """Rows of the grouped arrays, the shared expert's among them."""
        return self.rows * self.slots

    @property
    def used_matrices(self) -> float:
        return self.used_experts(self.rows) + 1

    def routed(self, source: Source) -> Inputs:
        """A routing of ours, and the same one as mlx-lm's sort makes it."""
        c = self.config
        routing = route(source.logits(self.rows, c.experts), c.top_k, c.normalise_scores)
        counts = np.diff(to_float64(routing.offsets))
        return {
            "routing": routing,
            "expert_of_row": mx.array(np.repeat(np.arange(c.experts, dtype=np.uint32), counts)),
            "mlx_lm_scores": routing.scores.astype(mx.bfloat16),
        }

    def sampled_rows(self) -> list[int]:
        """Grouped rows to check, routed ones and the shared expert's."""
        routed = self.rows * self.config.top_k
        return [*sample(routed, SAMPLED_ROWS), *(routed + row for row in sample(self.rows, SAMPLED_ROWS // 3))]

    def expert_of(self, inputs: Inputs, row: int) -> int | None:
        """The expert of a grouped row; None: the shared one."""
        if row >= self.rows * self.config.top_k:
            return None
        return int(inputs["expert_of_row"][row].item())


@dataclass(frozen=True)
class Route(_Chunk):
    """`route`: choice, stable sort by expert and block map."""

    @property
    def name(self) -> str:
        return f"moe.route.{self.rows}"

    @property
    def bytes(self) -> int:
        pairs = self.rows * self.config.top_k
        return 4 * self.rows * (self.config.experts + 1 + self.slots) + 4 * 3 * pairs

    def fixed(self, source: Source) -> Inputs:
        return {}

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        logits = source.logits(self.rows, self.config.experts)
        return {"logits": logits, **self.split_logits(logits)}

    def ours(self, inputs: Inputs) -> Outputs:
        r = route(inputs["logits"], self.config.top_k, self.config.normalise_scores)
        return [r.experts, r.scores, r.row_tokens, r.slot_rows, r.offsets, r.blocks]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        experts, scores, shared_score = self.route_chain(operations, inputs)
        flat = experts.flatten()
        order = mx.argsort(flat)
        return [experts, scores, order // self.config.top_k, mx.argsort(order), flat[order], shared_score]

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        c = self.config
        rows = sample(self.rows, 4 * SAMPLED_ROWS)
        experts, scores = to_float64(outputs[0]).astype(np.int64), to_float64(outputs[1])
        if arm != OURS:
            scores = np.concatenate([scores, to_float64(outputs[5])], axis=1)
        logits = to_float64(inputs["logits"][mx.array(rows)])
        want_experts, want_scores = reference.select_experts(logits, c.top_k, c.normalise_scores)
        ours, theirs = np.argsort(experts[rows], axis=1), np.argsort(want_experts, axis=1)
        same = np.array_equal(
            np.take_along_axis(experts[rows], ours, axis=1), np.take_along_axis(want_experts, theirs, axis=1)
        )
        if not same:
            return [exact("experts", False)]
        last = np.full((len(rows), 1), c.top_k)
        got = np.take_along_axis(scores[rows], np.concatenate([ours, last], axis=1), axis=1)
        want = np.take_along_axis(want_scores, np.concatenate([theirs, last], axis=1), axis=1)
        found = [exact("experts", True), error("scores", mx.array(got.astype(np.float32)), want)]
        if arm == OURS:
            order = np.argsort(experts.reshape(-1), kind="stable")
            found.append(exact("row_tokens", np.array_equal(to_float64(outputs[2]), order // c.top_k)))
            slot_rows = to_float64(outputs[3]).reshape(-1)
            found.append(exact("slot_rows", np.array_equal(slot_rows[order], np.arange(order.size))))
            counts = np.bincount(experts.reshape(-1), minlength=c.experts)
            found.append(exact("offsets", np.array_equal(np.diff(to_float64(outputs[4]).astype(np.int64)), counts)))
        return found


@dataclass(frozen=True)
class GroupedGateUp(_Chunk):
    """`grouped_gate_up`: gate and up products and SwiGLU of a chunk."""

    @property
    def name(self) -> str:
        return f"moe.grouped_gate_up.{self.rows}"

    @property
    def bytes(self) -> int:
        activations = BFLOAT16 * (self.rows * self.config.hidden_size + self.pairs * self.config.expert_size)
        return int(2 * self.used_matrices * self.matrix_bytes) + activations

    @property
    def flops(self) -> int | None:
        return 4 * self.pairs * self.config.hidden_size * self.config.expert_size

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        return self.routed(source) | {"x": source.normal(self.rows, self.config.hidden_size)}

    def ours(self, inputs: Inputs) -> Outputs:
        return [grouped_gate_up(inputs["x"], inputs["routing"], inputs["weights"])]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        w, x, experts = inputs["weights"], inputs["x"], inputs["expert_of_row"]
        gathered = x[inputs["routing"].row_tokens]
        up = operations.gather_matmul(gathered, w.up, experts, is_sorted=True)
        gate = operations.gather_matmul(gathered, w.gate, experts, is_sorted=True)
        shared = swiglu(operations.matmul(x, w.shared_gate), operations.matmul(x, w.shared_up))
        return [swiglu(gate, up), shared]

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        c, w = self.config, inputs["weights"]
        columns = sample(c.expert_size, SAMPLED_OUTPUTS)
        tokens = to_float64(inputs["routing"].row_tokens)
        want, rows = [], self.sampled_rows()
        for row in rows:
            expert = self.expert_of(inputs, row)
            token = row - self.rows * c.top_k if expert is None else int(tokens[row])
            x = to_float64(inputs["x"][token])
            if expert is None:
                matrices = [take_rows(m, columns) for m in (w.shared_gate, w.shared_up)]
            else:
                matrices = [expert_rows(m, expert, columns) for m in (w.gate, w.up)]
            gate, up = (linear_reference.dequantize(m) @ x for m in matrices)
            want.append(reference.silu(gate) * up)
        return [error("hidden", _taken(outputs, rows, columns), np.stack(want))]


@dataclass(frozen=True)
class GroupedDown(_Chunk):
    """`grouped_down`: the down products of a chunk."""

    @property
    def name(self) -> str:
        return f"moe.grouped_down.{self.rows}"

    @property
    def bytes(self) -> int:
        activations = BFLOAT16 * self.pairs * (self.config.hidden_size + self.config.expert_size)
        return int(self.used_matrices * self.matrix_bytes) + activations

    @property
    def flops(self) -> int | None:
        return 2 * self.pairs * self.config.hidden_size * self.config.expert_size

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        return self.routed(source) | {"hidden": source.normal(self.pairs, self.config.expert_size, deviation=0.5)}

    def ours(self, inputs: Inputs) -> Outputs:
        return [grouped_down(inputs["hidden"], inputs["routing"], inputs["weights"])]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        w, hidden = inputs["weights"], inputs["hidden"]
        routed = self.rows * self.config.top_k
        out = operations.gather_matmul(hidden[:routed], w.down, inputs["expert_of_row"], is_sorted=True)
        return [out, operations.matmul(hidden[routed:], w.shared_down)]

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        w = inputs["weights"]
        columns = sample(self.config.hidden_size, SAMPLED_OUTPUTS)
        want, rows = [], self.sampled_rows()
        for row in rows:
            expert = self.expert_of(inputs, row)
            matrix = take_rows(w.shared_down, columns) if expert is None else expert_rows(w.down, expert, columns)
            want.append(linear_reference.dequantize(matrix) @ to_float64(inputs["hidden"][row]))
        return [error("out", _taken(outputs, rows, columns), np.stack(want))]


@dataclass(frozen=True)
class CombineNorm(_Chunk):
    """`combine_norm`: the weighted sum of each token's experts with the residual, and the next layer's norm."""

    @property
    def name(self) -> str:
        return f"moe.combine_norm.{self.rows}"

    @property
    def bytes(self) -> int:
        return BFLOAT16 * self.config.hidden_size * (self.pairs + 3 * self.rows)

    def fixed(self, source: Source) -> Inputs:
        return {}

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        c = self.config
        routed = self.rows * c.top_k
        outputs = source.normal(self.pairs, c.hidden_size, deviation=0.1)
        return {
            **self.routed(source),
            "outputs": outputs,
            "mlx_lm_routed": mx.contiguous(outputs[:routed]),
            "mlx_lm_shared": mx.contiguous(outputs[routed:]),
            "residual": source.normal(self.rows, c.hidden_size),
            "norm": source.gain(c.hidden_size),
        }

    def ours(self, inputs: Inputs) -> Outputs:
        names = ("outputs", "routing", "residual", "norm")
        return list(combine_norm(*[inputs[name] for name in names], self.config.norm_eps))

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        k, scores, residual = self.config.top_k, inputs["mlx_lm_scores"], inputs["residual"]
        routed = inputs["mlx_lm_routed"][inputs["routing"].slot_rows.flatten()].reshape(self.rows, k, -1)
        y = (routed * scores[:, :k, None]).sum(axis=-2)
        x = residual + (y + scores[:, k:] * inputs["mlx_lm_shared"])
        return [x, operations.rms_norm(x, inputs["norm"], self.config.norm_eps)]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"residual": outputs[0]}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        routing, tokens = inputs["routing"], sample(self.rows, SAMPLED_ROWS)
        pick = mx.array(tokens)
        scores, slot_rows = to_float64(routing.scores[pick]), to_float64(routing.slot_rows[pick])
        want = to_float64(inputs["residual"][pick])
        for i, token in enumerate(tokens):
            rows = [*(int(row) for row in slot_rows[i]), self.rows * self.config.top_k + token]
            want[i] += scores[i] @ to_float64(inputs["outputs"][mx.array(rows)])
        # The norm of what the arm itself rounded.
        x, normed = outputs[0][pick], outputs[1][pick]
        norm = linear_reference.rms_norm(to_float64(x), to_float64(inputs["norm"]), self.config.norm_eps)
        return [error("out", x, want), error("normed", normed, norm)]


def _taken(outputs: Outputs, rows: list[int], columns: list[int]) -> mx.array:
    """Some rows and columns of outputs that stand above each other."""
    taken, start = [], 0
    for output in outputs:
        inside = [row - start for row in rows if start <= row < start + output.shape[0]]
        if inside:
            taken.append(output[mx.array(inside)][:, mx.array(columns)])
        start += output.shape[0]
    return mx.concatenate(taken)


def cases(config: ModelConfig, rows: tuple[int, ...]) -> Iterator[Case]:
    """The cases of the family; `rows` are the chunk sizes."""
    for count in rows:
        yield Route(config, count)
        yield GroupedGateUp(config, count)
        yield GroupedDown(config, count)
        yield CombineNorm(config, count)
