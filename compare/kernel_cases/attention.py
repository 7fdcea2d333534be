"""Attention kernels: a decode step over contexts of several lengths, and a chunk of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache as MlxLmCache

from lily_mlx.kernels import attention
from lily_mlx.kernels.attention import TAIL_ROWS, AttentionShape, KVCache, capacity_for, reference
from lily_mlx.model import ModelConfig

from .case import OURS, Case, Error, Inputs, Outputs, error, exact, relative_error, sample, to_float64
from .operations import Operations
from .source import Source

SAMPLED_ROWS = 4
BFLOAT16 = 2  # bytes


def main_rows(length: int) -> int:
    """Rows of a sequence that are in `keys` and `values`, not in the tail."""
    return length - length % TAIL_ROWS


@dataclass(frozen=True)
class _Attention(Case):
    family: ClassVar[str] = "attention"

    @property
    def calls_per_step(self) -> int:
        return self.attention_layers

    @property
    def scale(self) -> float:
        return float(self.config.attention.head_dim**-0.5)

    def cached_bytes(self, length: int) -> int:
        """Keys and values of so many tokens."""
        s = self.config.attention
        return 2 * s.kv_heads * s.head_dim * length * BFLOAT16

    def random_cache(self, source: Source, length: int) -> KVCache:
        """The cache of a sequence, with room for its whole blocks."""
        s = self.config.attention
        main = (s.kv_heads, capacity_for(main_rows(length)), s.head_dim)
        tail = (s.kv_heads, TAIL_ROWS, s.head_dim)
        return KVCache(*(source.normal(*shape) for shape in (main, main, tail, tail)))

    def mlx_lm_arrays(self, cache: KVCache, length: int, room: int) -> tuple[mx.array, mx.array]:
        """The same keys and values in mlx-lm's layout: [1, Hkv, a multiple of 256 rows, D], `room` rows free."""
        step = MlxLmCache.step
        capacity = -(-(length + room) // step) * step

        def joined(main: mx.array, tail: mx.array) -> mx.array:
            rows = mx.concatenate([main[:, : main_rows(length)], tail[:, : length % TAIL_ROWS]], axis=1)
            return mx.pad(rows, [(0, 0), (0, capacity - length), (0, 0)])[None]

        return joined(cache.keys, cache.tail_keys), joined(cache.values, cache.tail_values)

    def split_projection(self, proj: mx.array) -> Inputs:
        """The outputs of mlx-lm's q, k and v projections, [1, M, columns], contiguous."""
        s = self.config.attention
        columns = {
            "q_and_gate": slice(0, s.key_offset),
            "k": slice(s.key_offset, s.value_offset),
            "v": slice(s.value_offset, s.projection_width),
        }
        return {f"mlx_lm_{name}": mx.contiguous(proj[:, part])[None] for name, part in columns.items()}

    def layer_inputs(self, source: Source, rows: int, position: int) -> Inputs:
        s = self.config.attention
        proj = source.normal(rows, s.projection_width)
        return {
            "proj": proj,
            "q_norm": source.gain(s.head_dim),
            "k_norm": source.gain(s.head_dim),
            "position": mx.array([position], mx.int32),
            **self.split_projection(proj),
        }

    def queries_and_gate(self, inputs: Inputs) -> tuple[mx.array, mx.array]:
        """Queries [1, M, Hq, D] and gates [1, M, Hq * D] of mlx-lm's q projection, as views."""
        joined = inputs["mlx_lm_q_and_gate"]
        rows = joined.shape[1]
        q, gate = mx.split(joined.reshape(1, rows, self.config.attention.query_heads, -1), 2, axis=-1)
        return q, gate.reshape(1, rows, -1)

    def prepare_chain(self, operations: Operations, inputs: Inputs, position: int) -> tuple[mx.array, mx.array]:
        """q [1, Hq, M, D] and k [1, Hkv, M, D] after norm and rotary embedding, as in mlx-lm."""
        s, eps = self.config.attention, self.config.norm_eps
        q, _ = self.queries_and_gate(inputs)
        k = inputs["mlx_lm_k"].reshape(1, -1, s.kv_heads, s.head_dim)
        q = operations.rms_norm(q, inputs["q_norm"], eps).transpose(0, 2, 1, 3)
        k = operations.rms_norm(k, inputs["k_norm"], eps).transpose(0, 2, 1, 3)
        q = operations.rope(q, s.rotary_dim, s.rope_theta, position)
        return q, operations.rope(k, s.rotary_dim, s.rope_theta, position)

    def new_values(self, inputs: Inputs) -> mx.array:
        s = self.config.attention
        return inputs["mlx_lm_v"].reshape(1, -1, s.kv_heads, s.head_dim).transpose(0, 2, 1, 3)

    def sampled_attention(
        self, q: mx.array, keys: mx.array, values: mx.array, position: int, proj: mx.array, tokens: list[int]
    ) -> tuple[list[int], np.ndarray]:
        """By the definition: two query heads, the first and the last, of some tokens; their columns and values."""
        s = self.config.attention
        gates = to_float64(proj[:, : s.key_offset].reshape(-1, s.query_heads, 2, s.head_dim)[:, :, 1])
        one = AttentionShape(1, 1, s.head_dim, s.rotary_dim, s.rope_theta)
        queries = to_float64(q)
        columns: list[int] = []
        found = []
        for head in sorted({0, s.query_heads - 1}):
            kv = slice(head // s.group, head // s.group + 1)
            k, v = to_float64(keys[kv]), to_float64(values[kv])
            columns += range(head * s.head_dim, (head + 1) * s.head_dim)
            found.append(
                np.concatenate(
                    [
                        reference.attend(
                            queries[t : t + 1, head : head + 1],
                            k,
                            v,
                            position + t,
                            gates[t : t + 1, head : head + 1],
                            one,
                        )
                        for t in tokens
                    ]
                )
            )
        return columns, np.concatenate(found, axis=1)


@dataclass(frozen=True)
class Step(_Attention):
    """`attention.step`: norm, rotary embedding and the new key and value of one token, and its attention."""

    context: int

    phase: ClassVar[Literal["decode", "prefill"]] = "decode"

    @property
    def name(self) -> str:
        return f"attention.step.{self.context}"

    @property
    def shape(self) -> dict[str, int]:
        s = self.config.attention
        return {"context": self.context, "query_heads": s.query_heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim}

    @property
    def bytes(self) -> int:
        s = self.config.attention
        new_tail = self.cached_bytes(self.context % TAIL_ROWS + 1)
        row = BFLOAT16 * (s.projection_width + s.query_heads * s.head_dim)
        return self.cached_bytes(self.context) + new_tail + row

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        cache = self.random_cache(source, self.context)
        keys, values = self.mlx_lm_arrays(cache, self.context, 1)
        inputs = self.layer_inputs(source, 1, self.context)
        return inputs | {"cache": cache, "mlx_lm_keys": keys, "mlx_lm_values": values}

    def ours(self, inputs: Inputs) -> Outputs:
        names = ("proj", "q_norm", "k_norm", "position", "cache")
        arguments: list[Any] = [*(inputs[name] for name in names), self.config.attention, self.config.norm_eps]
        out, cache = attention.step(*arguments)
        return [out, cache.tail_keys, cache.tail_values]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        q, k = self.prepare_chain(operations, inputs, self.context)
        cache = MlxLmCache()
        cache.keys, cache.values, cache.offset = inputs["mlx_lm_keys"], inputs["mlx_lm_values"], self.context
        cache.update_and_fetch(k, self.new_values(inputs))
        out = operations.attention(q, cache.keys, cache.values, self.context + 1, self.scale)
        _, gate = self.queries_and_gate(inputs)
        return [(out.transpose(0, 2, 1, 3).reshape(1, 1, -1) * mx.sigmoid(gate))[0], cache.keys, cache.values]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        found = {"q_norm": outputs[0][0, : self.config.attention.head_dim]}
        if arm != OURS:
            found |= {"mlx_lm_keys": outputs[1], "mlx_lm_values": outputs[2]}  # so that MLX can update them in place
        return found

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        s = self.config.attention
        proj, q_norm, k_norm = (to_float64(inputs[name]) for name in ("proj", "q_norm", "k_norm"))
        q, k = reference.prepare(proj, q_norm, k_norm, np.array([self.context]), s, self.config.norm_eps)
        v = reference.split_projection(proj, s)[3]
        keys, values = (
            mx.concatenate([old[0, :, : self.context], mx.array(new[0, :, None].astype(np.float32))], axis=1)
            for old, new in ((inputs["mlx_lm_keys"], k), (inputs["mlx_lm_values"], v))
        )
        queries = mx.array(q.astype(np.float32))
        columns, want = self.sampled_attention(queries, keys, values, self.context, inputs["proj"], [0])
        row = self.context % TAIL_ROWS if arm == OURS else self.context
        new_keys, new_values = (x if arm == OURS else x[0] for x in outputs[1:])
        found = [
            error("out", outputs[0][:, mx.array(columns)], want),
            error("k", new_keys[:, row], k[0]),
            error("v", new_values[:, row], v[0]),
        ]
        if arm == OURS:
            kept = [mx.array_equal(new[:, :row], old[:, :row]).item() for new, old in self._tails(inputs, outputs)]
            found.append(exact("rows of the tail before", all(kept)))
        return found

    def _tails(self, inputs: Inputs, outputs: Outputs) -> list[tuple[mx.array, mx.array]]:
        cache = inputs["cache"]
        return [(outputs[1], cache.tail_keys), (outputs[2], cache.tail_values)]


@dataclass(frozen=True)
class _Chunk(_Attention):
    rows: int
    context: int

    phase: ClassVar[Literal["decode", "prefill"]] = "prefill"

    @property
    def shape(self) -> dict[str, int]:
        s = self.config.attention
        return {
            "rows": self.rows,
            "context": self.context,
            "query_heads": s.query_heads,
            "kv_heads": s.kv_heads,
            "head_dim": s.head_dim,
        }

    @property
    def length(self) -> int:
        """Tokens after the chunk."""
        return self.context + self.rows


@dataclass(frozen=True)
class Prepare(_Chunk):
    """`attention.prepare`: norm and rotary embedding of a chunk."""

    @property
    def name(self) -> str:
        return f"attention.prepare.{self.rows}"

    @property
    def shape(self) -> dict[str, int]:
        return {name: value for name, value in super().shape.items() if name != "context"}

    @property
    def bytes(self) -> int:
        s = self.config.attention
        return 2 * BFLOAT16 * self.rows * s.head_dim * (s.query_heads + s.kv_heads)

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        return self.layer_inputs(source, self.rows, self.context)

    def ours(self, inputs: Inputs) -> Outputs:
        names = ("proj", "q_norm", "k_norm", "position")
        arguments: list[Any] = [*(inputs[name] for name in names), self.config.attention, self.config.norm_eps]
        return list(attention.prepare(*arguments))

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        q, k = self.prepare_chain(operations, inputs, self.context)
        return [q[0].transpose(1, 0, 2), k[0].transpose(1, 0, 2)]

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        tokens = sample(self.rows, 16 * SAMPLED_ROWS)
        norms = [to_float64(inputs[name]) for name in ("q_norm", "k_norm")]
        q, k = [], []
        for token in tokens:
            proj = to_float64(inputs["proj"][token : token + 1])
            position = np.array([self.context + token])
            arguments: list[Any] = [proj, *norms, position, self.config.attention, self.config.norm_eps]
            one_q, one_k = reference.prepare(*arguments)
            q.append(one_q)
            k.append(one_k)
        index = mx.array(tokens)
        return [
            error("q", outputs[0][index], np.concatenate(q)),
            error("k", outputs[1][index], np.concatenate(k)),
        ]


@dataclass(frozen=True)
class Append(_Chunk):
    """`attention.append`: a chunk's keys and values behind the cache."""

    @property
    def name(self) -> str:
        return f"attention.append.{self.rows}.context_{self.context}"

    @property
    def bytes(self) -> int:
        new_blocks = main_rows(self.length) > main_rows(self.context)
        return 2 * self.cached_bytes(self.length if new_blocks else self.length % TAIL_ROWS)

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        s = self.config.attention
        inputs = self.layer_inputs(source, self.rows, self.context)
        cache = self.random_cache(source, self.context)
        keys, values = self.mlx_lm_arrays(cache, self.context, 0)
        new = {"k": source.normal(self.rows, s.kv_heads, s.head_dim), "cache": cache}
        return inputs | new | {"mlx_lm_keys": keys, "mlx_lm_values": values}

    def ours(self, inputs: Inputs) -> Outputs:
        cache, k, proj, position = (inputs[name] for name in ("cache", "k", "proj", "position"))
        if "tail_keys" in inputs:
            cache = replace(cache, tail_keys=inputs["tail_keys"])
        cache = attention.append(cache, k, proj, position, self.context, self.config.attention)
        return [cache.keys, cache.values, cache.tail_keys, cache.tail_values]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        cache = MlxLmCache()
        if self.context:
            cache.keys, cache.values, cache.offset = inputs["mlx_lm_keys"], inputs["mlx_lm_values"], self.context
        keys, values = cache.update_and_fetch(inputs["k"].transpose(1, 0, 2)[None], self.new_values(inputs))
        return [keys[0], values[0]]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        return {"tail_keys": outputs[2]} if arm == OURS else {}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        s = self.config.attention
        want_k = to_float64(inputs["k"]).transpose(1, 0, 2)
        want_v = to_float64(self.new_values(inputs)[0])
        if arm == OURS:
            # Joined through the reference, which knows which rows are in the tail.
            cache = reference.KVCache(*(to_float64(x) for x in outputs))
            keys, values = reference.rows(cache, self.length)
        else:
            keys, values = to_float64(outputs[0]), to_float64(outputs[1])
        old_k = to_float64(inputs["mlx_lm_keys"][0, :, : self.context])
        old_v = to_float64(inputs["mlx_lm_values"][0, :, : self.context])
        shape = (s.kv_heads, self.length, s.head_dim)
        same_k = keys.shape == shape and np.array_equal(keys, np.concatenate([old_k, want_k], axis=1))
        same_v = values.shape == shape and np.array_equal(values, np.concatenate([old_v, want_v], axis=1))
        return [exact("keys", same_k), exact("values", same_v)]


@dataclass(frozen=True)
class PrefillAttention(_Chunk):
    """`prefill_attention`: a chunk over its context and itself."""

    @property
    def name(self) -> str:
        return f"attention.prefill_attention.{self.rows}.context_{self.context}"

    @property
    def calls_per_step(self) -> int:
        return self.attention_layers - self.ends_with_attention

    @property
    def bytes(self) -> int:
        s = self.config.attention
        return self.cached_bytes(self.length) + 3 * BFLOAT16 * self.rows * s.query_heads * s.head_dim

    @property
    def flops(self) -> int | None:
        s = self.config.attention
        pairs = self.rows * self.context + self.rows * (self.rows + 1) // 2
        return 4 * s.query_heads * s.head_dim * pairs

    def fixed(self, source: Source) -> Inputs:
        cache = self.random_cache(source, self.length)
        keys, values = self.mlx_lm_arrays(cache, self.length, 0)
        return {"cache": cache, "mlx_lm_keys": keys, "mlx_lm_values": values}

    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        s = self.config.attention
        inputs = self.layer_inputs(source, self.rows, self.context)
        return inputs | {"q": source.normal(self.rows, s.query_heads, s.head_dim)}

    def ours(self, inputs: Inputs) -> Outputs:
        q, cache, position, proj = (inputs[name] for name in ("q", "cache", "position", "proj"))
        return [attention.prefill_attention(q, cache, position, proj, self.config.attention)]

    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        keys, values = inputs["mlx_lm_keys"], inputs["mlx_lm_values"]
        q = inputs["q"].transpose(1, 0, 2)[None]
        out = operations.attention(q, keys, values, self.length, self.scale)
        _, gate = self.queries_and_gate(inputs)
        return [(out.transpose(0, 2, 1, 3).reshape(1, self.rows, -1) * mx.sigmoid(gate))[0]]

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        s = self.config.attention
        return {"q": outputs[0].reshape(self.rows, s.query_heads, s.head_dim)}

    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        tokens = sample(self.rows, SAMPLED_ROWS)
        columns, want = self.sampled_attention(
            inputs["q"],
            inputs["mlx_lm_keys"][0, :, : self.length],
            inputs["mlx_lm_values"][0, :, : self.length],
            self.context,
            inputs["proj"],
            tokens,
        )
        got = outputs[0][mx.array(tokens)][:, mx.array(columns)]
        # Rows over many keys are small: each is compared by its own largest value.
        errors = [relative_error(got[i], want[i]) for i in range(len(tokens))]
        return [Error("out", max(errors), 2e-2)]


def cases(
    config: ModelConfig, contexts: tuple[int, ...], chunks: tuple[tuple[int, tuple[int, ...]], ...]
) -> Iterator[Case]:
    """The cases of the family: contexts of a decode step; chunk sizes, each with the contexts before it."""
    for context in contexts:
        yield Step(config, context)
    for rows, before in chunks:
        yield Prepare(config, rows, before[-1])
        for context in before:
            yield Append(config, rows, context)
            yield PrefillAttention(config, rows, context)
