"""What the mixture-of-experts cases share: sizes, weights, and mlx-lm's choice of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from lily_mlx.kernels.moe import (
    ExpertWeights,
)

from .case import (
    Case,
    Inputs,
    packed_bytes,
)
from .operations import Operations
from .source import Source

BFLOAT16 = 2  # bytes


@dataclass(frozen=True)
class Experts(Case):
    family: ClassVar[str] = "moe"

    @property
    def calls_per_step(self) -> int:
        return self.config.layers

    @property
    def slots(self) -> int:
        """Experts of a token, with the shared one."""
        return self.config.top_k + 1

    @property
    def matrix_bytes(self) -> int:
        """One matrix of one expert."""
        return packed_bytes(self.config.expert_size * self.config.hidden_size)

    @property
    def sizes(self) -> dict[str, int]:
        c = self.config
        return {"experts": c.experts, "top_k": c.top_k, "hidden": c.hidden_size, "intermediate": c.expert_size}

    def used_experts(self, rows: int) -> float:
        """Routed experts that some of `rows` tokens choose, expected for uniform routing."""
        c = self.config
        return float(c.experts * (1 - (1 - c.top_k / c.experts) ** rows))

    def expert_weights(self, source: Source) -> ExpertWeights:
        c = self.config
        up, down = (c.expert_size, c.hidden_size), (c.hidden_size, c.expert_size)
        gain = (2 * c.layers) ** -0.5
        return ExpertWeights(
            gate=source.weight(c.experts, *up),
            up=source.weight(c.experts, *up),
            down=source.weight(c.experts, *down, gain=gain),
            shared_gate=source.weight(*up),
            shared_up=source.weight(*up),
            shared_down=source.weight(*down, gain=gain),
        )

    def fixed(self, source: Source) -> Inputs:
        return {"weights": self.expert_weights(source)}

    def split_logits(self, logits: mx.array) -> Inputs:
        """The router's and the shared expert's logits as mlx-lm has them: apart, in bfloat16."""
        return {
            "mlx_lm_logits": mx.contiguous(logits[:, :-1]).astype(mx.bfloat16),
            "mlx_lm_shared_logit": mx.contiguous(logits[:, -1:]).astype(mx.bfloat16),
        }

    def route_chain(self, operations: Operations, inputs: Inputs) -> tuple[mx.array, mx.array, mx.array]:
        """Experts and scores [M, top_k] and the shared expert's gate [M, 1], as in mlx-lm."""
        gates = operations.softmax(inputs["mlx_lm_logits"])
        experts = operations.largest(gates, self.config.top_k)
        scores = mx.take_along_axis(gates, experts, axis=-1)
        if self.config.normalise_scores:
            scores = scores / scores.sum(axis=-1, keepdims=True)
        return experts, scores, mx.sigmoid(inputs["mlx_lm_shared_logit"])
