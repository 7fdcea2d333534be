"""Linear kernels: projections of a decode step, norms and products of a prefill chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import mlx.core as mx
from mlx_lm.models.activations import precise_swiglu

from lily_mlx.kernels.linear import (
    QuantizedWeight,
    gated_norm_project_add,
    matmul,
    norm_matmul,
    norm_project,
    project_add,
    reference,
    rms_norm,
)
from lily_mlx.kernels.linear.policy import norm_matmul_plan
from lily_mlx.model import ModelConfig

from .case import (
    BFLOAT16_LIMIT,
    OURS,
    Case,
    Error,
    Inputs,
    Outputs,
    error,
    packed_bytes,
    sample,
    split_rows,
    take_rows,
    to_float64,
)
from .operations import Operations
from .reading import Reading
from .source import Source

SAMPLED_OUTPUTS = 96
SAMPLED_ROWS = 8


@dataclass(frozen=True)
class Projection:
    """A weight of the model.

    Attributes:
        label: in the names of cases.
        parts: rows of the weights that mlx-lm keeps apart, in the order of the joined one.
        columns: K.
        layers: how many the model has.
        bits: of a code.
        is_float32: the product stays in float32 (router logits).
        gain: of its random values.
    """

    label: str
    parts: tuple[int, ...]
    columns: int
    layers: int
    bits: int = 4
    is_float32: bool = False
    gain: float = 1.0

    @property
    def rows(self) -> int:
        return sum(self.parts)

    @property
    def dtype(self) -> mx.Dtype:
        return mx.float32 if self.is_float32 else mx.bfloat16

    @property
    def bytes(self) -> int:
        return packed_bytes(self.rows * self.columns, self.bits)

    def weight(self, source: Source) -> QuantizedWeight:
        return source.weight(self.rows, self.columns, bits=self.bits, gain=self.gain)


def projections(config: ModelConfig) -> dict[str, Projection]:
    """The projections of the model by label."""
    delta, attention = config.deltanet, config.attention
    attention_layers = sum(config.is_attention(i) for i in range(config.layers))
    deltanet_layers = config.layers - attention_layers
    value_width = delta.value_heads * delta.value_dim
    kv_width = attention.kv_heads * attention.head_dim
    residual_gain = (2 * config.layers) ** -0.5
    found = [
        Projection(
            "deltanet_in",
            (delta.channels, value_width, delta.value_heads, delta.value_heads),
            config.hidden_size,
            deltanet_layers,
        ),
        Projection("attention_in", (attention.key_offset, kv_width, kv_width), config.hidden_size, attention_layers),
        Projection("router", (config.experts, 1), config.hidden_size, config.layers, bits=8, is_float32=True),
        Projection("deltanet_out", (config.hidden_size,), value_width, deltanet_layers, gain=residual_gain),
        Projection(
            "attention_out",
            (config.hidden_size,),
            attention.query_heads * attention.head_dim,
            attention_layers,
            gain=residual_gain,
        ),
    ]
    return {projection.label: projection for projection in found}


@dataclass(frozen=True)
class _DecodeProjection(Case):
    """A matrix-vector product with what stands around it."""

    projection: Projection

    family: ClassVar[str] = "linear"
    phase: ClassVar[Literal["decode", "prefill"]] = "decode"

    @property
    def shape(self) -> dict[str, int]:
        return {"n": self.projection.rows, "k": self.projection.columns, "bits": self.projection.bits}

    @property
    def calls_per_step(self) -> int:
        return self.projection.layers

    @property
    def bytes(self) -> int:
        written = self.projection.rows * (4 if self.projection.is_float32 else 2)
        return self.projection.bytes + 2 * self.projection.columns + written

    def reading(self, inputs: Inputs) -> Reading | None:
        return Reading(inputs["weight"], mx.zeros(1, mx.uint32))


@dataclass(frozen=True)
class NormProject(_DecodeProjection):
    """`norm_project`: RMSNorm and a joined projection."""

    @property
    def name(self) -> str:
        return f"linear.norm_project.{self.projection.label}"

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        columns = self.projection.columns
        weight = self.projection.weight(source)
        return {
            "x": source.normal(1, columns),
            "norm": source.gain(columns),
            "weight": weight,
            "parts": split_rows(weight, self.projection.parts),
        }

    def ours(self, inputs: Inputs) -> Outputs:
        return [
            norm_project(
                inputs["x"], inputs["norm"], inputs["weight"], self.config.norm_eps, out_dtype=self.projection.dtype
            )
        ]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        x = operations.rms_norm(inputs["x"], inputs["norm"], self.config.norm_eps)
        return [operations.matmul(x, part) for part in inputs["parts"]]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        columns = self.projection.columns
        if self.projection.is_float32 or outputs[0].size < columns:
            return {}
        return {"x": outputs[0][:, :columns]}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        rows = sample(self.projection.rows, SAMPLED_OUTPUTS)
        want = reference.norm_project(
            to_float64(inputs["x"]),
            to_float64(inputs["norm"]),
            take_rows(inputs["weight"], rows),
            self.config.norm_eps,
        )
        return [error("out", mx.concatenate(outputs, axis=-1)[:, mx.array(rows)], want)]


@dataclass(frozen=True)
class ProjectAdd(_DecodeProjection):
    """`project_add`: a projection and the residual."""

    @property
    def name(self) -> str:
        return f"linear.project_add.{self.projection.label}"

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        return {
            "x": source.normal(1, self.projection.columns),
            "weight": self.projection.weight(source),
            "residual": source.normal(1, self.projection.rows),
        }

    def ours(self, inputs: Inputs) -> Outputs:
        return [project_add(inputs["x"], inputs["weight"], inputs["residual"])]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        return [inputs["residual"] + operations.matmul(inputs["x"], inputs["weight"])]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"residual": outputs[0]}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        rows = sample(self.projection.rows, SAMPLED_OUTPUTS)
        want = reference.project_add(
            to_float64(inputs["x"]), take_rows(inputs["weight"], rows), to_float64(inputs["residual"])[:, rows]
        )
        return [error("out", outputs[0][:, mx.array(rows)], want)]


@dataclass(frozen=True)
class GatedNormProjectAdd(_DecodeProjection):
    """`gated_norm_project_add`: DeltaNet's gated norm, its output projection and the residual."""

    @property
    def name(self) -> str:
        return f"linear.gated_norm_project_add.{self.projection.label}"

    @property
    def bytes(self) -> int:
        return super().bytes + 2 * self.projection.columns

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        delta, columns = self.config.deltanet, self.projection.columns
        proj = source.normal(1, delta.projection_width)
        return {
            "y": source.normal(1, columns),
            "proj": proj,
            "z": mx.contiguous(proj[:, delta.z_offset : delta.b_offset]),
            "norm": source.gain(delta.value_dim),
            "weight": self.projection.weight(source),
            "residual": source.normal(1, self.projection.rows),
        }

    def ours(self, inputs: Inputs) -> Outputs:
        return [
            gated_norm_project_add(
                inputs["y"],
                inputs["proj"],
                self.config.deltanet.z_offset,
                inputs["norm"],
                inputs["weight"],
                inputs["residual"],
                self.config.norm_eps,
            )
        ]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        delta = self.config.deltanet
        heads = inputs["y"].reshape(delta.value_heads, delta.value_dim)
        normed = operations.rms_norm(heads, inputs["norm"], self.config.norm_eps)
        gated = precise_swiglu(heads, inputs["z"].reshape(heads.shape), normed)
        return [inputs["residual"] + operations.matmul(gated.reshape(1, -1), inputs["weight"])]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"residual": outputs[0]}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        rows = sample(self.projection.rows, SAMPLED_OUTPUTS)
        want = reference.gated_norm_project_add(
            to_float64(inputs["y"]),
            to_float64(inputs["proj"]),
            self.config.deltanet.z_offset,
            to_float64(inputs["norm"]),
            take_rows(inputs["weight"], rows),
            to_float64(inputs["residual"])[:, rows],
            self.config.norm_eps,
        )
        return [error("out", outputs[0][:, mx.array(rows)], want)]


@dataclass(frozen=True)
class RmsNorm(Case):
    """`rms_norm` of a chunk: before the experts. The norm before a mixer is part of `combine_norm`."""

    rows: int

    family: ClassVar[str] = "linear"
    phase: ClassVar[Literal["decode", "prefill"]] = "prefill"

    @property
    def name(self) -> str:
        return f"linear.rms_norm.{self.rows}"

    @property
    def shape(self) -> dict[str, int]:
        return {"rows": self.rows, "k": self.config.hidden_size}

    @property
    def calls_per_step(self) -> int:
        # Before the first layer, and before the experts of all but the last where that is a launch of its own.
        return 1 if _is_one_launch(self.config, self.rows) else self.config.layers

    @property
    def bytes(self) -> int:
        return 4 * self.rows * self.config.hidden_size

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        return {"x": source.normal(self.rows, self.config.hidden_size), "norm": source.gain(self.config.hidden_size)}

    def ours(self, inputs: Inputs) -> Outputs:
        return [rms_norm(inputs["x"], inputs["norm"], self.config.norm_eps)]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        return [operations.rms_norm(inputs["x"], inputs["norm"], self.config.norm_eps)]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"x": outputs[0]}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        rows = mx.array(sample(self.rows, 4 * SAMPLED_ROWS))
        want = reference.rms_norm(to_float64(inputs["x"][rows]), to_float64(inputs["norm"]), self.config.norm_eps)
        return [error("out", outputs[0][rows], want)]


@dataclass(frozen=True)
class Matmul(Case):
    """`matmul` of a chunk, with the residual for output projections."""

    projection: Projection
    rows: int

    family: ClassVar[str] = "linear"
    phase: ClassVar[Literal["decode", "prefill"]] = "prefill"

    @property
    def name(self) -> str:
        return f"linear.matmul.{self.projection.label}.{self.rows}"

    @property
    def shape(self) -> dict[str, int]:
        p = self.projection
        return {"rows": self.rows, "n": p.rows, "k": p.columns, "bits": p.bits}

    @property
    def calls_per_step(self) -> int:
        in_last_layer = {"router": True, "attention_out": self.ends_with_attention}
        in_last_layer["deltanet_out"] = not self.ends_with_attention
        return self.projection.layers - in_last_layer.get(self.projection.label, False)

    @property
    def has_residual(self) -> bool:
        return self.projection.label.endswith("_out")

    @property
    def bytes(self) -> int:
        p = self.projection
        activations = self.rows * (2 * p.columns + p.rows * (4 if p.is_float32 else 2))
        return p.bytes + activations + (2 * self.rows * p.rows if self.has_residual else 0)

    @property
    def flops(self) -> int | None:
        return 2 * self.rows * self.projection.rows * self.projection.columns

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        p = self.projection
        weight = p.weight(source)
        return {
            "x": source.normal(self.rows, p.columns),
            "weight": weight,
            "parts": split_rows(weight, p.parts),
            "residual": source.normal(self.rows, p.rows) if self.has_residual else None,
        }

    def ours(self, inputs: Inputs) -> Outputs:
        return [matmul(inputs["x"], inputs["weight"], inputs["residual"], out_dtype=self.projection.dtype)]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        products = [operations.matmul(inputs["x"], part) for part in inputs["parts"]]
        return [inputs["residual"] + products[0]] if self.has_residual else products

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        if self.has_residual:
            return {"residual": outputs[0]}
        size = self.rows * self.projection.columns
        if self.projection.is_float32 or outputs[0].size < size:
            return {}
        return {"x": outputs[0].reshape(-1)[:size].reshape(self.rows, -1)}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        columns = sample(self.projection.rows, SAMPLED_OUTPUTS)
        rows = mx.array(sample(self.rows, SAMPLED_ROWS))
        index = mx.array(columns)
        residual = None if inputs["residual"] is None else to_float64(inputs["residual"][rows][:, index])
        want = reference.matmul(to_float64(inputs["x"][rows]), take_rows(inputs["weight"], columns), residual)
        got = mx.concatenate([part[rows] for part in outputs], axis=-1)[:, index]
        if not self.projection.is_float32:
            return [error("out", got, want)]
        # Our kernel rounds the weights to bfloat16 for the matrix instructions; apart from that it is float32.
        found = [error("out", got, want, limit=BFLOAT16_LIMIT)]
        if arm == OURS:
            rounded = reference.round_bfloat16(reference.dequantize(take_rows(inputs["weight"], columns)))
            found.append(error("out, by rounded weights", got, to_float64(inputs["x"][rows]) @ rounded.T))
        return found


@dataclass(frozen=True)
class NormMatmul(Case):
    """`norm_matmul` of a chunk: the norm before the experts and the router's product."""

    projection: Projection
    rows: int

    family: ClassVar[str] = "linear"
    phase: ClassVar[Literal["decode", "prefill"]] = "prefill"

    @property
    def name(self) -> str:
        return f"linear.norm_matmul.{self.projection.label}.{self.rows}"

    @property
    def shape(self) -> dict[str, int]:
        p = self.projection
        return {"rows": self.rows, "n": p.rows, "k": p.columns, "bits": p.bits}

    @property
    def calls_per_step(self) -> int:
        return self.projection.layers - 1  # the last layer serves one row

    @property
    def bytes(self) -> int:
        p = self.projection
        return p.bytes + self.rows * (4 * p.columns + p.rows * (4 if p.is_float32 else 2))

    @property
    def flops(self) -> int | None:
        return 2 * self.rows * self.projection.rows * self.projection.columns

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        p = self.projection
        weight = p.weight(source)
        return {
            "x": source.normal(self.rows, p.columns),
            "norm": source.gain(p.columns),
            "weight": weight,
            "parts": split_rows(weight, p.parts),
        }

    def ours(self, inputs: Inputs) -> Outputs:
        eps = self.config.norm_eps
        out, normed = norm_matmul(inputs["x"], inputs["norm"], inputs["weight"], eps, out_dtype=self.projection.dtype)
        return [normed, out]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        normed = operations.rms_norm(inputs["x"], inputs["norm"], self.config.norm_eps)
        return [normed, *(operations.matmul(normed, part) for part in inputs["parts"])]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"x": outputs[0]}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        columns = sample(self.projection.rows, SAMPLED_OUTPUTS)
        rows, index = mx.array(sample(self.rows, SAMPLED_ROWS)), mx.array(columns)
        x, norm = to_float64(inputs["x"][rows]), to_float64(inputs["norm"])
        normed = outputs[0][rows]
        got = mx.concatenate([part[rows] for part in outputs[1:]], axis=-1)[:, index]
        # The weights are rounded to bfloat16 for the matrix instructions; apart from that it is float32.
        want = reference.matmul(to_float64(normed), take_rows(inputs["weight"], columns))
        return [
            error("normed", normed, reference.rms_norm(x, norm, self.config.norm_eps)),
            error("out", got, want, limit=BFLOAT16_LIMIT),
        ]


def cases(config: ModelConfig, rows: tuple[int, ...]) -> Iterator[Case]:
    """The cases of the family; `rows` are the chunk sizes."""
    found = projections(config)
    for label in ("deltanet_in", "attention_in", "router"):
        yield NormProject(config, found[label])
    yield GatedNormProjectAdd(config, found["deltanet_out"])
    yield ProjectAdd(config, found["attention_out"])
    for count in rows:
        yield RmsNorm(config, count)
        for projection in found.values():
            if projection.label == "router" and _is_one_launch(config, count):
                yield NormMatmul(config, projection, count)
            else:
                yield Matmul(config, projection, count)


def _is_one_launch(config: ModelConfig, rows: int) -> bool:
    """Whether the norm before the experts and the router's product are one launch in a chunk of so many rows."""
    return norm_matmul_plan(rows, config.experts + 1, config.hidden_size) is not None
