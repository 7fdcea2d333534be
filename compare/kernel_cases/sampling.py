"""The ends of a step: embedding, output projection, choice of the token."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import mlx.core as mx
import numpy as np

from lily_mlx.kernels.linear import QuantizedWeight, embed
from lily_mlx.kernels.linear import reference as linear_reference
from lily_mlx.kernels.sampling import head, reference, select
from lily_mlx.model import ModelConfig

from ..synthetic import EMBEDDING_DEVIATION, LOGITS_DEVIATION
from .case import Case, Error, Inputs, Outputs, error, exact, packed_bytes, sample, take_rows, to_float64
from .operations import Operations
from .reading import Reading
from .source import Source

SAMPLED_TOKENS = 64
SAMPLED_LOGITS = 512


@dataclass(frozen=True)
class Embed(Case):
    """`embed`: rows of the embedding table."""

    rows: int

    family: ClassVar[str] = "sampling"
    # A decode step embeds one token, a chunk all of its own.
    phase: ClassVar[Literal["decode", "prefill"]] = "prefill"

    @property
    def name(self) -> str:
        return f"sampling.embed.{self.rows}"

    @property
    def shape(self) -> dict[str, int]:
        return {"rows": self.rows, "vocabulary": self.config.vocab_size, "k": self.config.hidden_size}

    @property
    def calls_per_step(self) -> int:
        return 1

    @property
    def bytes(self) -> int:
        return self.rows * (packed_bytes(self.config.hidden_size) + 2 * self.config.hidden_size)

    def fixed(self, source: Source) -> Inputs:
        columns = self.config.hidden_size
        gain = EMBEDDING_DEVIATION * columns**0.5
        return {"table": source.weight(self.config.vocab_size, columns, gain=gain)}

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        return {"tokens": source.integers(self.config.vocab_size, self.rows)}

    def ours(self, inputs: Inputs) -> Outputs:
        return [embed(inputs["tokens"], inputs["table"])]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        w, tokens = inputs["table"], inputs["tokens"]
        return [
            mx.dequantize(w.weight[tokens], w.scales[tokens], w.biases[tokens], group_size=w.group_size, bits=w.bits)
        ]

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        rows = sample(self.rows, SAMPLED_TOKENS)
        tokens = [int(token) for token in to_float64(inputs["tokens"])[rows]]
        want = linear_reference.dequantize(take_rows(inputs["table"], tokens))
        return [error("out", outputs[0][mx.array(rows)], want)]


@dataclass(frozen=True)
class EmbedToken(Embed):
    """`embed` of one token, in a decode step."""

    phase: ClassVar[Literal["decode", "prefill"]] = "decode"

    @property
    def name(self) -> str:
        return "sampling.embed"


@dataclass(frozen=True)
class Head(Case):
    """`head`: final norm, output projection and the best token of each part of the vocabulary."""

    family: ClassVar[str] = "sampling"
    phase: ClassVar[Literal["decode", "prefill"]] = "decode"

    @property
    def name(self) -> str:
        return "sampling.head"

    @property
    def shape(self) -> dict[str, int]:
        return {"vocabulary": self.config.vocab_size, "k": self.config.hidden_size}

    @property
    def calls_per_step(self) -> int:
        return 1

    @property
    def bytes(self) -> int:
        return packed_bytes(self.config.vocab_size * self.config.hidden_size) + 4 * self.config.vocab_size

    def fixed(self, source: Source) -> Inputs:
        return {
            "sampling": mx.zeros(8),
            "seed": mx.array([1], mx.uint32),
            "position": mx.array([7], mx.int32),
        }

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        columns = self.config.hidden_size
        return {
            "x": source.normal(1, columns),
            "norm": source.gain(columns),
            "weight": source.weight(self.config.vocab_size, columns, gain=LOGITS_DEVIATION),
        }

    def ours(self, inputs: Inputs) -> Outputs:
        x, norm, weight = inputs["x"], inputs["norm"], inputs["weight"]
        rest = [inputs[name] for name in ("sampling", "seed", "position")]
        return list(head(x, norm, weight, self.config.norm_eps, *rest))

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        # The choice of the token is in `Select`'s chain.
        x = operations.rms_norm(inputs["x"], inputs["norm"], self.config.norm_eps)
        return [operations.matmul(x, inputs["weight"])]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        if len(outputs) == 3:  # at temperature 0 the position decides nothing
            return {"position": outputs[2][:1].view(mx.int32)}
        return {"x": outputs[0][:, : self.config.hidden_size]}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        rows = sample(self.config.vocab_size, SAMPLED_LOGITS)
        want = linear_reference.norm_project(
            to_float64(inputs["x"]), to_float64(inputs["norm"]), take_rows(inputs["weight"], rows), self.config.norm_eps
        )
        found = [error("logits", outputs[0][:, mx.array(rows)], want)]
        if len(outputs) == 3:
            logits, values, indices = (to_float64(output) for output in outputs)
            token, _ = reference.select(values, indices, np.array([0]))
            found.append(exact("best token", int(token[0]) == int(np.argmax(logits[0]))))
        return found

    def reading(self, inputs: Inputs) -> Reading | None:
        return Reading(inputs["weight"], mx.zeros(1, mx.uint32))


@dataclass(frozen=True)
class Select(Case):
    """`select`: the best of all parts. mlx-lm takes the argmax of all logits instead."""

    family: ClassVar[str] = "sampling"
    phase: ClassVar[Literal["decode", "prefill"]] = "decode"

    @property
    def name(self) -> str:
        return "sampling.select"

    @functools.cached_property
    def parts(self) -> int:
        """Parts that `head` makes of the vocabulary on this device."""
        columns, rows = self.config.hidden_size, self.config.vocab_size
        x, norm = mx.zeros((1, columns), mx.bfloat16), mx.zeros(columns, mx.bfloat16)
        words, groups = mx.zeros((rows, columns // 8), mx.uint32), mx.zeros((rows, columns // 64), mx.bfloat16)
        weight = QuantizedWeight.pack(words, groups, groups, 4, 64)
        ends = mx.zeros(8), mx.zeros(1, mx.uint32), mx.zeros(1, mx.int32)
        return int(head(x, norm, weight, self.config.norm_eps, *ends)[1].size)

    @property
    def shape(self) -> dict[str, int]:
        return {"vocabulary": self.config.vocab_size}

    @property
    def calls_per_step(self) -> int:
        return 1

    @property
    def bytes(self) -> int:
        return 8 * self.parts

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        vocabulary, parts = self.config.vocab_size, self.parts
        logits = source.normal(1, vocabulary, dtype=mx.float32)
        # Interleaved parts, each with its best token, as `head` hands them on.
        columns = -(-vocabulary // parts)
        padded = mx.pad(logits, [(0, 0), (0, columns * parts - vocabulary)], constant_values=-1e30)
        grid = padded.reshape(columns, parts)
        row = mx.argmax(grid, axis=0).astype(mx.uint32)
        return {
            "logits": logits,
            "value": mx.max(grid, axis=0),
            "index": row * parts + mx.arange(parts, dtype=mx.uint32),
            "position": mx.array([7], mx.int32),
        }

    def ours(self, inputs: Inputs) -> Outputs:
        return list(select(inputs["value"], inputs["index"], inputs["position"]))

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        return [mx.argmax(inputs["logits"], axis=-1)]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"position": outputs[1]} if len(outputs) == 2 else {}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        best = int(np.argmax(to_float64(inputs["logits"])[0]))
        found = [exact("token", int(outputs[0].item()) == best)]
        if len(outputs) == 2:
            found.append(exact("position", int(outputs[1].item()) == int(inputs["position"].item()) + 1))
        return found


def cases(config: ModelConfig, rows: tuple[int, ...]) -> Iterator[Case]:
    """The cases of the family; `rows` are the chunk sizes."""
    yield EmbedToken(config, 1)
    yield Head(config)
    yield Select(config)
    for count in rows:
        yield Embed(config, count)
