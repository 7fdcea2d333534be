"""What a computation launches, counted from MLX's exported graph without running it.

`mx.export_function` calls back with one record for each primitive. A primitive that only changes how an
array is addressed costs nothing; every other one is a launch. The longest chain of launches is the number
of stages: what a device with unlimited room could not run at the same time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

# Primitives that MLX performs by changing shape, strides or offset alone.
FREE = frozenset(
    {
        "AsStrided", "Broadcast", "BroadcastAxes", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice",
        "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Array:
    """An array of the graph: its name there, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size


@dataclass(frozen=True)
class Primitive:
    """One primitive of the graph."""

    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    arguments: tuple[Any, ...]

    @property
    def is_kernel(self) -> bool:
        return self.name == "CustomKernel"

    @property
    def kernel_name(self) -> str:
        """The name given to the kernel, without MLX's prefix."""
        return str(self.arguments[0]).removeprefix("custom_kernel_") if self.is_kernel else ""

    @property
    def source(self) -> str:
        """The exact Metal text of a custom kernel."""
        return str(self.arguments[1]) if self.is_kernel else ""


@dataclass
class Graph:
    """An exported graph in the order in which MLX records it (inputs before users)."""

    primitives: list[Primitive] = field(default_factory=list)
    inputs: tuple[Array, ...] = ()
    outputs: tuple[Array, ...] = ()

    @property
    def launches(self) -> list[Primitive]:
        return [p for p in self.primitives if p.name not in FREE]

    def stages(self) -> int:
        """The longest chain of launches."""
        depth: dict[str, int] = {}
        for primitive in self.primitives:
            level = max((depth.get(a.name, 0) for a in primitive.inputs), default=0)
            level += primitive.name not in FREE
            for output in primitive.outputs:
                depth[output.name] = level
        return max(depth.values(), default=0)

    def bytes(self, read: Callable[[Primitive], int] | None = None) -> int:
        """Bytes that all launches read and write.

        Args:
            read: bytes that a launch reads, where that is less than its whole inputs (a gather).
        """
        total = 0
        for primitive in self.launches:
            total += read(primitive) if read else sum(a.bytes for a in primitive.inputs)
            total += sum(a.bytes for a in primitive.outputs)
        return total

    def counts(self, name: Callable[[Primitive], str] = lambda p: p.name) -> Counter[str]:
        return Counter(name(p) for p in self.launches)


def trace(function: Callable[..., Any], arguments: Sequence[mx.array]) -> Graph:
    """Exports `function(*arguments)` and returns its graph. Nothing is computed or allocated."""
    graph = Graph()

    def arrays(entries: Sequence[tuple[str, Sequence[int], mx.Dtype]]) -> tuple[Array, ...]:
        return tuple(Array(name, tuple(shape), dtype) for name, shape, dtype in entries)

    def record(entry: dict[str, Any]) -> None:
        if entry["type"] == "primitive":
            graph.primitives.append(
                Primitive(
                    entry["name"],
                    arrays(entry["inputs"]),
                    arrays(entry["outputs"]),
                    tuple(entry["arguments"]),
                )
            )
        elif entry["type"] == "inputs":
            graph.inputs = arrays(entry["inputs"])
        elif entry["type"] == "outputs":
            graph.outputs = arrays(entry["outputs"])

    mx.export_function(record, function, *arguments)
    return graph
