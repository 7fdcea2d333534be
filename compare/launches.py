"""`python -m compare.launches`: what one decode step and one prefill chunk of the full-size model launch.

Counted from exported graphs, on any machine and without weights: launches, stages (the longest chain of
launches), and the bytes that they read and write. mlx-lm is traced as MLX would launch it on Metal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from lily_mlx.kernels.linear.weight import sections_of

from . import results
from .full_size import configuration
from .graph import Graph, Primitive
from .mlx_lm_trace import launches_of, step_graph

# One decode step as its authors counted it. The article's engine was published later in a leaner form.
PUBLISHED = {
    "article": {"launches": 795, "stages": 555},
    "published Rust engine": {"launches": 605, "stages": 425},
}


def packed_words(weights: int) -> int:
    """Words of a packed weight of 4 bits in groups of 64."""
    return sections_of(weights // 64, 64, 4, 64).size


class ByteCount:
    """Bytes that a launch moves, where it does not touch the whole of its inputs.

    Args:
        rows: tokens that go through the layers at once.
        context: tokens that were cached before.
    """

    def __init__(self, rows: int, context: int):
        text = configuration()["text_config"]
        self.rows, self.context = rows, context
        self.experts, self.top_k = text["num_experts"], text["num_experts_per_tok"]
        hidden, size = text["hidden_size"], text["moe_intermediate_size"]
        # Our kernels have each weight in one array.
        self.stack = packed_words(self.experts * size * hidden)
        self.table = packed_words(text["vocab_size"] * hidden)
        self.vocabulary = text["vocab_size"]
        self.head_dim, self.kv_heads = text["head_dim"], text["num_key_value_heads"]
        # Expected share of the experts that some row chooses, when routing is uniform.
        self.used = 1 - (1 - self.top_k / self.experts) ** rows

    def __call__(self, primitive: Primitive) -> int:
        name = primitive.kernel_name or primitive.name
        if name in ("Gather", "SliceUpdate"):
            return 2 * min(a.bytes for a in (*primitive.inputs[1:], *primitive.outputs) if a.bytes)
        read = sum(self._read(a.shape, a.bytes, name) for a in primitive.inputs)
        return int(read + sum(self._written(a.shape, a.bytes) for a in primitive.outputs))

    def _read(self, shape: tuple[int, ...], size: int, name: str) -> float:
        if (len(shape) == 3 and shape[0] == self.experts) or shape == (self.stack,):
            return size * self.used
        if shape and shape[0] in (self.vocabulary, self.table) and "embed" in name:
            return size / self.vocabulary * self.rows
        return size * self._cached_share(shape)

    def _written(self, shape: tuple[int, ...], size: int) -> float:
        return size * self._cached_share(shape)

    def _cached_share(self, shape: tuple[int, ...]) -> float:
        """The used share of a block of keys or values [Hkv, rows, D]."""
        if len(shape) == 3 and shape[0] == self.kv_heads and shape[2] == self.head_dim:
            in_tail = (self.context + self.rows) % 128 or 128
            used = in_tail if shape[1] == 128 else self.context + self.rows - in_tail
            return min(1.0, used / shape[1])
        return 1.0


def minimum_bytes(context: int) -> dict[str, int]:
    """The fewest bytes that a decode step of one token can move."""
    text = configuration()["text_config"]
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    attention_layers = layers // text["full_attention_interval"]
    heads, kv, dim = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    size = text["moe_intermediate_size"]

    def packed(weights: int, bits: int = 4) -> int:
        return weights * bits // 8 + weights // 64 * 4  # codes, and a scale and a bias for each group

    delta_rows = 2 * keys + 2 * values + 2 * text["linear_num_value_heads"]
    return {
        "routed experts": layers * packed(3 * text["num_experts_per_tok"] * size * hidden),
        "gated deltanet projections": (layers - attention_layers) * packed((delta_rows + values) * hidden),
        "lm_head": packed(text["vocab_size"] * hidden),
        "attention projections": attention_layers * packed((2 * heads * dim + 2 * kv * dim + heads * dim) * hidden),
        "shared experts": layers * packed(3 * size * hidden),
        "routers": layers * packed((text["num_experts"] + 1) * hidden, bits=8),
        "gated deltanet state": (layers - attention_layers) * 2 * values * text["linear_key_head_dim"] * 4,
        "keys and values": attention_layers * 2 * kv * dim * 2 * context,
    }


def figures(graph: Graph, rows: int, context: int) -> dict[str, Any]:
    """Launches, stages, bytes and the primitives that are not our kernels."""
    count = ByteCount(rows, context)
    launches = graph.launches
    return {
        "launches": sum(launches_of(p) for p in launches),
        "stages": graph.stages(),
        "bytes": sum(count(p) for p in launches),
        "other_ops": sum(not p.is_kernel for p in launches),
    }


def measure(context: int, chunk: int) -> dict[str, dict[str, dict[str, Any]]]:
    """The figures of both engines."""
    from .lily_trace import chunk_graph, decode_graph

    return {
        "lily_mlx": {
            "decode": figures(decode_graph(context), 1, context),
            "prefill": figures(chunk_graph(chunk, context), chunk, context),
        },
        "mlx_lm": {
            "decode": figures(step_graph(1, context), 1, context),
            "prefill": figures(step_graph(chunk, context), chunk, context),
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="compare.launches", description=__doc__)
    parser.add_argument("--context", type=int, default=4096, help="tokens cached before the step")
    parser.add_argument("--chunk", type=int, default=2048, help="rows of the prefill chunk")
    parser.add_argument("--bandwidth", type=float, help="the device's measured bandwidth, bytes per second")
    parser.add_argument("--step-ms", type=float, help="a measured decode step, to give its share of the floor")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--no-write", action="store_true", help="do not write a result file")
    options = parser.parse_args(argv)
    measured = measure(options.context, options.chunk)
    least = minimum_bytes(options.context)
    rows = [
        {"engine": engine, "phase": phase, **values}
        for engine, phases in measured.items()
        for phase, values in phases.items()
    ]
    floor = sum(least.values()) / options.bandwidth * 1e3 if options.bandwidth else None
    if not options.no_write:
        path = results.write(
            "launches",
            rows,
            seed=0,
            gate=results.Gate(),
            context=options.context,
            chunk=options.chunk,
            minimum_bytes=least,
            published=PUBLISHED,
            floor_ms=floor,
        )
        print(f"wrote {path}", file=sys.stderr)
    if options.json:
        print(json.dumps(measured))
        return
    lines: list[list[object]] = [
        [row["engine"], row["phase"], row["launches"], row["stages"], row["bytes"] / 1e9, row["other_ops"]]
        for row in rows
    ]
    lines += [[name, "decode", v["launches"], v["stages"], None, None] for name, v in PUBLISHED.items()]
    print(results.table(["engine", "phase", "launches", "stages", "GB moved", "other operations"], lines))
    print(f"\nLeast bytes of a decode step at context {options.context:,}: {sum(least.values()) / 1e9:.3f} GB")
    if floor is not None:
        print(f"Floor at {options.bandwidth / 1e9:,.0f} GB/s: {floor:.3f} ms")
        if options.step_ms:
            print(f"Measured step {options.step_ms:.3f} ms: {floor / options.step_ms:.1%} of the floor")


if __name__ == "__main__":
    main()
