"""Gated DeltaNet kernels: one token, the three launches of a chunk, and the one launch of a short chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.activations import precise_swiglu
from mlx_lm.models.gated_delta import compute_g

from lily_mlx.kernels import deltanet
from lily_mlx.kernels.deltanet import policy, reference
from lily_mlx.model import ModelConfig

from ..state import STATE_DEVIATION
from .case import BFLOAT16_LIMIT, FLOAT32_LIMIT, Case, Error, Inputs, Outputs, error, sample, to_float64
from .operations import MetalKernels, Operations
from .source import Source

L2_EPS = 1e-6
SAMPLED_ROWS = 32


@dataclass(frozen=True)
class _DeltaNet(Case):
    family: ClassVar[str] = "deltanet"

    @property
    def calls_per_step(self) -> int:
        return self.deltanet_layers

    @property
    def state_bytes(self) -> int:
        s = self.config.deltanet
        return 4 * s.value_heads * s.value_dim * s.key_dim

    @property
    def value_width(self) -> int:
        return self.config.deltanet.value_heads * self.config.deltanet.value_dim

    def layer_inputs(self, source: Source, rows: int) -> Inputs:
        """Projection, states and weights of a layer, also as mlx-lm holds them."""
        s = self.config.deltanet
        proj = source.normal(rows, s.projection_width)
        conv_weight = source.normal(s.conv_kernel, s.channels, deviation=0.5)
        columns = {
            "qkv": slice(0, s.channels),
            "b": slice(s.b_offset, s.a_offset),
            "a": slice(s.a_offset, s.projection_width),
        }
        return {
            "proj": proj,
            "conv_state": source.normal(s.conv_kernel - 1, s.channels),
            "state": source.normal(s.value_heads, s.value_dim, s.key_dim, deviation=STATE_DEVIATION, dtype=mx.float32),
            "conv_weight": conv_weight,
            "conv1d_weight": mx.contiguous(conv_weight.T[:, :, None]),
            "a_log": mx.log(source.uniform(1.0, 16.0, s.value_heads)),
            "dt_bias": source.uniform(-6.0, -2.0, s.value_heads, dtype=mx.bfloat16).astype(mx.float32),
            **{name: mx.contiguous(proj[:, part])[None] for name, part in columns.items()},
        }

    def gated_delta_chain(
        self, function: Callable[..., tuple[mx.array, mx.array]], inputs: Inputs, *qkv_gates: mx.array
    ) -> tuple[mx.array, mx.array]:
        """y [M, Hv * Dv] and the state [Hv, Dv, Dk] by a function with mlx-lm's arguments."""
        y, state = function(*qkv_gates, inputs["state"][None])
        return y.reshape(y.shape[1], -1), state[0]

    def prepare_chain(self, operations: Operations, inputs: Inputs) -> list[mx.array]:
        """q, k, v [1, M, heads, dim], decay, beta [1, M, Hv] and the next conv_state [1, 3, C], as in mlx-lm."""
        s = self.config.deltanet
        conv_input = mx.concatenate([inputs["conv_state"][None], inputs["qkv"]], axis=1)
        conv_state = mx.contiguous(conv_input[:, -(s.conv_kernel - 1) :])
        x = nn.silu(mx.conv1d(conv_input, inputs["conv1d_weight"], groups=s.channels))
        key_width = s.key_heads * s.key_dim
        rows = x.shape[1]
        q, k, v = mx.split(x, [key_width, 2 * key_width], axis=-1)
        q, k = (part.reshape(1, rows, s.key_heads, s.key_dim) for part in (q, k))
        scale = s.key_dim**-0.5
        q = scale**2 * operations.rms_norm(q, None, L2_EPS * scale**2)
        k = scale * operations.rms_norm(k, None, L2_EPS * scale**2)
        v = v.reshape(1, rows, s.value_heads, s.value_dim)
        decay = compute_g(inputs["a_log"], inputs["a"], inputs["dt_bias"])
        return [q, k, v, decay, mx.sigmoid(inputs["b"]), conv_state]

    def norm_chain(self, operations: Operations, y: mx.array, inputs: Inputs) -> mx.array:
        """The gated norm of y [M, Hv * Dv]."""
        s = self.config.deltanet
        heads = y.reshape(y.shape[0], s.value_heads, s.value_dim)
        normed = operations.rms_norm(heads, inputs["norm"], self.config.norm_eps)
        return precise_swiglu(heads, inputs["z"].reshape(heads.shape), normed).reshape(y.shape)


@dataclass(frozen=True)
class Step(_DeltaNet):
    """`deltanet.step`: convolution, gates and delta rule of one token."""

    phase: ClassVar[Literal["decode", "prefill"]] = "decode"

    @property
    def name(self) -> str:
        return "deltanet.step"

    @property
    def shape(self) -> dict[str, int]:
        s = self.config.deltanet
        return {"key_heads": s.key_heads, "value_heads": s.value_heads, "channels": s.channels}

    @property
    def bytes(self) -> int:
        s = self.config.deltanet
        convolution = 2 * s.channels * (2 * (s.conv_kernel - 1) + s.conv_kernel)
        return 2 * self.state_bytes + convolution + 2 * (s.projection_width + self.value_width)

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        return self.layer_inputs(source, 1)

    def ours(self, inputs: Inputs) -> Outputs:
        names = ("proj", "conv_state", "state", "conv_weight", "a_log", "dt_bias")
        return list(deltanet.step(*[*(inputs[name] for name in names), self.config.deltanet]))

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        q, k, v, decay, beta, conv_state = self.prepare_chain(operations, inputs)
        y, state = self.gated_delta_chain(operations.gated_delta, inputs, q, k, v, decay, beta)
        return [y, conv_state[0], state]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"conv_state": outputs[1]}  # not the state, which has to come from memory

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        names = ("proj", "conv_state", "state", "conv_weight", "a_log", "dt_bias")
        arguments: list[Any] = [*(to_float64(inputs[name]) for name in names), self.config.deltanet]
        y, conv_state, state = reference.step(*arguments)
        # q, k and v are bfloat16 between the convolution and the delta rule, which the definition does not round.
        return [
            error("y", outputs[0], y),
            error("conv_state", outputs[1], conv_state),
            error("state", outputs[2], state, limit=BFLOAT16_LIMIT),
        ]


@dataclass(frozen=True)
class _Chunk(_DeltaNet):
    rows: int

    phase: ClassVar[Literal["decode", "prefill"]] = "prefill"

    @property
    def calls_per_step(self) -> int:
        """A short chunk takes one launch in place of these."""
        return 0 if policy.is_short(self.rows) else self.deltanet_layers

    @property
    def shape(self) -> dict[str, int]:
        s = self.config.deltanet
        return {"rows": self.rows, "key_heads": s.key_heads, "value_heads": s.value_heads}


@dataclass(frozen=True)
class Prepare(_Chunk):
    """`deltanet.prepare`: convolution, normalisation and gates of a chunk."""

    @property
    def name(self) -> str:
        return f"deltanet.prepare.{self.rows}"

    @property
    def bytes(self) -> int:
        s = self.config.deltanet
        read = 2 * self.rows * (s.channels + 2 * s.value_heads)
        return read + self.rows * (2 * s.channels + 8 * s.value_heads) + 2 * s.channels * (3 * s.conv_kernel - 2)

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        return self.layer_inputs(source, self.rows)

    def ours(self, inputs: Inputs) -> Outputs:
        names = ("proj", "conv_state", "conv_weight", "a_log", "dt_bias")
        return list(deltanet.prepare(*[*(inputs[name] for name in names), self.config.deltanet]))

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        return [output[0] for output in self.prepare_chain(operations, inputs)]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"conv_state": outputs[5]}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        s, found = self.config.deltanet, []
        # The first rows need conv_state; the last ones need only the rows before them.
        count = min(SAMPLED_ROWS, self.rows)
        rest = [to_float64(inputs[name]) for name in ("conv_weight", "a_log", "dt_bias")]
        for place, start in (("first", 0), ("last", self.rows - count)):
            before = inputs["conv_state"]
            if start >= s.conv_kernel - 1:
                before = inputs["proj"][start - s.conv_kernel + 1 : start, : s.channels]
            elif start:
                continue
            proj = inputs["proj"][start : start + count]
            arguments: list[Any] = [to_float64(proj), to_float64(before), *rest, s]
            *want, conv_state = reference.prepare(*arguments)
            names = ("q", "k", "v", "decay", "beta")
            for name, got, expected in zip(names, outputs, want, strict=False):
                found.append(error(f"{name}, {place} rows", got[start : start + count], expected))
            if start + count == self.rows:
                found.append(error("conv_state", outputs[5], conv_state))
        return found


@dataclass(frozen=True)
class Scan(_Chunk):
    """`deltanet.scan`: the delta rule over a chunk."""

    @property
    def name(self) -> str:
        return f"deltanet.scan.{self.rows}"

    @property
    def bytes(self) -> int:
        s = self.config.deltanet
        row = 2 * s.channels + 8 * s.value_heads + 2 * self.value_width
        return self.rows * row + 2 * self.state_bytes

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        layer = self.layer_inputs(source, self.rows)
        names = ("proj", "conv_state", "conv_weight", "a_log", "dt_bias")
        prepared = deltanet.prepare(*[*(layer[name] for name in names), self.config.deltanet])
        inputs: Inputs = dict(zip(("q", "k", "v", "decay", "beta"), prepared, strict=False))
        return inputs | {"state": layer["state"]}

    def ours(self, inputs: Inputs) -> Outputs:
        names = ("q", "k", "v", "decay", "beta", "state")
        return list(deltanet.scan(*[*(inputs[name] for name in names), self.config.deltanet]))

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        return self._by(operations.gated_delta, inputs)

    def others(self) -> dict[str, Callable[[Inputs], Outputs]]:
        def in_one_type(*arrays: mx.array) -> tuple[mx.array, mx.array]:
            q, k, v, decay, beta, state = arrays
            y, state = mx.fast.gated_delta_update(q, k, v, decay.astype(q.dtype), beta.astype(q.dtype), state)
            return y, state

        return {
            "mx.fast.gated_delta_update": functools.partial(self._by, in_one_type),
            "mx.fast.gated_delta_update, Metal kernel": functools.partial(self._by, MetalKernels().fused_gated_delta),
        }

    def _by(self, function: Callable[..., tuple[mx.array, mx.array]], inputs: Inputs) -> Outputs:
        names = ("q", "k", "v", "decay", "beta")
        return list(self.gated_delta_chain(function, inputs, *(inputs[name][None] for name in names)))

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"state": outputs[1]}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        # Two value heads, each with its own key head, over all rows.
        s, y, state = self.config.deltanet, [], []
        heads = sorted({0, s.value_heads - 1})
        for head in heads:
            key_head = head // (s.value_heads // s.key_heads)
            part = deltanet.DeltaNetShape(1, 1, s.key_dim, s.value_dim, s.conv_kernel)
            q, k = (to_float64(inputs[name][:, key_head : key_head + 1]) for name in ("q", "k"))
            v, decay, beta = (to_float64(inputs[name][:, head : head + 1]) for name in ("v", "decay", "beta"))
            one, last = reference.scan(q, k, v, decay, beta, to_float64(inputs["state"][head : head + 1]), part)
            y.append(one)
            state.append(last)
        got = outputs[0].reshape(self.rows, s.value_heads, s.value_dim)[:, mx.array(heads)]
        return [
            error("y", got.reshape(self.rows, -1), np.concatenate(y, axis=1)),
            error("state", outputs[1][mx.array(heads)], np.concatenate(state), limit=FLOAT32_LIMIT),
        ]


@dataclass(frozen=True)
class GatedNorm(_Chunk):
    """`deltanet.gated_norm`: the norm of a chunk's heads, gated by z."""

    @property
    def name(self) -> str:
        return f"deltanet.gated_norm.{self.rows}"

    @property
    def bytes(self) -> int:
        return 6 * self.rows * self.value_width

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        s = self.config.deltanet
        proj = source.normal(self.rows, s.projection_width)
        return {
            "y": source.normal(self.rows, self.value_width),
            "proj": proj,
            "z": mx.contiguous(proj[:, s.z_offset : s.b_offset]),
            "norm": source.gain(s.value_dim),
        }

    def ours(self, inputs: Inputs) -> Outputs:
        s = self.config.deltanet
        return [deltanet.gated_norm(inputs["y"], inputs["proj"], inputs["norm"], s, self.config.norm_eps)]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        return [self.norm_chain(operations, inputs["y"], inputs)]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"y": outputs[0]}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        rows = mx.array(sample(self.rows, SAMPLED_ROWS))
        want = reference.gated_norm(
            to_float64(inputs["y"][rows]),
            to_float64(inputs["proj"][rows]),
            to_float64(inputs["norm"]),
            self.config.deltanet,
            self.config.norm_eps,
        )
        return [error("out", outputs[0][rows], want)]


@dataclass(frozen=True)
class ShortChunk(_Chunk):
    """`deltanet.short_chunk`: from the projection of a short chunk to its gated norm."""

    @property
    def name(self) -> str:
        return f"deltanet.short_chunk.{self.rows}"

    @property
    def calls_per_step(self) -> int:
        return self.deltanet_layers

    @property
    def bytes(self) -> int:
        s = self.config.deltanet
        convolution = 2 * s.channels * (2 * (s.conv_kernel - 1) + s.conv_kernel)
        return 2 * self.state_bytes + convolution + 2 * self.rows * (s.projection_width + self.value_width)

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        s, inputs = self.config.deltanet, self.layer_inputs(source, self.rows)
        z = mx.contiguous(inputs["proj"][:, s.z_offset : s.b_offset])
        return inputs | {"z": z, "norm": source.gain(s.value_dim)}

    def ours(self, inputs: Inputs) -> Outputs:
        arguments = [inputs[name] for name in self._ARGUMENTS]
        return list(deltanet.short_chunk(*arguments, self.config.deltanet, self.config.norm_eps))

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        q, k, v, decay, beta, conv_state = self.prepare_chain(operations, inputs)
        y, state = self.gated_delta_chain(operations.gated_delta, inputs, q, k, v, decay, beta)
        return [self.norm_chain(operations, y, inputs), conv_state[0], state]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"conv_state": outputs[1]}  # not the state, which has to come from memory

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        arguments: list[Any] = [to_float64(inputs[name]) for name in self._ARGUMENTS]
        out, conv_state, state = reference.short_chunk(*arguments, self.config.deltanet, self.config.norm_eps)
        return [
            error("out", outputs[0], out),
            error("conv_state", outputs[1], conv_state),
            error("state", outputs[2], state, limit=BFLOAT16_LIMIT),
        ]

    _ARGUMENTS: ClassVar = ("proj", "conv_state", "state", "conv_weight", "a_log", "dt_bias", "norm")


def cases(config: ModelConfig, rows: tuple[int, ...]) -> Iterator[Case]:
    """The cases of the family; `rows` are the chunk sizes."""
    yield Step(config)
    for count in rows:
        if policy.is_short(count):
            yield ShortChunk(config, count)
        yield Prepare(config, count)
        yield Scan(config, count)
        yield GatedNorm(config, count)
