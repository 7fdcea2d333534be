"""What a kernel case is: inputs, our kernel, the chain it replaces, a reference, and what it moves."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import mlx.core as mx
import numpy as np

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.model import ModelConfig

from .source import Source

if TYPE_CHECKING:
    from .operations import Operations
    from .reading import Reading

OURS, MLX_OPS, MLX_METAL, READ_ONLY = "ours", "mlx_ops", "mlx_metal", "read_only"

BFLOAT16_LIMIT = 2e-2
FLOAT32_LIMIT = 1e-4

Inputs = dict[str, Any]
Outputs = list[mx.array]


class UnavailableError(RuntimeError):
    """A baseline does not exist on this device or in this installation; the message says why."""


@dataclass(frozen=True)
class Error:
    """max |got - want| / max |want| of one output, and the most that it may be."""

    output: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return bool(self.value <= self.limit)  # NaN never passes


@dataclass(frozen=True)
class Case(abc.ABC):
    """A kernel of ours at one shape of the model.

    Args:
        config: the model whose shapes count.
    """

    config: ModelConfig

    family: ClassVar[str]
    phase: ClassVar[Literal["decode", "prefill"]]

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """`family.function[.weight][.size]`."""

    @property
    @abc.abstractmethod
    def shape(self) -> dict[str, int]:
        """Shape parameters; `rows` in prefill, `context` where it matters."""

    @property
    @abc.abstractmethod
    def calls_per_step(self) -> int:
        """How often it occurs in a decode step or a prefill chunk."""

    @property
    @abc.abstractmethod
    def bytes(self) -> int:
        """Bytes that our kernel has to read and write, each once."""

    @property
    def flops(self) -> int | None:
        """Floating-point operations, for kernels that belong on the matrix units."""
        return None

    def fixed(self, source: Source) -> Inputs:
        """Inputs that all copies share, because a call reads only a part of them or because they are large."""
        return {}

    @abc.abstractmethod
    def varying(self, source: Source, fixed: Inputs) -> Inputs:
        """Inputs of one copy, for our kernel and for the chain."""

    @abc.abstractmethod
    def ours(self, inputs: Inputs) -> Outputs:
        """Our kernel."""

    @abc.abstractmethod
    def chain(self, operations: Operations, inputs: Inputs) -> Outputs:
        """What mlx-lm's model computes in its place, by MLX's operations or by its Metal kernels."""

    def others(self) -> dict[str, Callable[[Inputs], Outputs]]:
        """Further ways to compute the same, by name. They stay out of the sums."""
        return {}

    def links(self, arm: str, outputs: Outputs) -> Inputs:
        """Inputs of the next call that are views of this one's outputs: the calls then run one by one."""
        return {}

    @abc.abstractmethod
    def errors(self, arm: str, inputs: Inputs, outputs: Outputs) -> list[Error]:
        """Errors against the definition in float64, of a sample of the outputs where all are too many."""

    def reading(self, inputs: Inputs) -> Reading | None:
        """The weights that a kernel which only reads would read; None: not a matrix-vector kernel."""
        return None

    # Layers of the model.

    @property
    def attention_layers(self) -> int:
        return sum(self.config.is_attention(i) for i in range(self.config.layers))

    @property
    def deltanet_layers(self) -> int:
        return self.config.layers - self.attention_layers

    @property
    def ends_with_attention(self) -> bool:
        """Whether the last layer is an attention layer. It serves a chunk's last row only, by kernels of a decode step,
        except for what its cache keeps."""
        return self.config.is_attention(self.config.layers - 1)


def to_float64(x: mx.array) -> np.ndarray:
    """Values in float64; integers stay integers."""
    if mx.issubdtype(x.dtype, mx.floating):
        return np.array(x.astype(mx.float32)).astype(np.float64)
    return np.array(x)


def relative_error(got: mx.array | np.ndarray, want: np.ndarray) -> float:
    """max |got - want| / max |want|; infinite for a wrong shape or a value that is not a number."""
    values = to_float64(got) if isinstance(got, mx.array) else got
    if values.shape != want.shape or not np.all(np.isfinite(values)):
        return math.inf
    scale = max(float(np.abs(want).max(initial=0.0)), 1e-30)
    return float(np.abs(values - want).max(initial=0.0)) / scale


def exact(output: str, same: bool) -> Error:
    """An output that must be right to the last bit."""
    return Error(output, 0.0 if same else math.inf, 0.0)


def limit_of(x: mx.array) -> float:
    """The limit for an output's dtype."""
    return FLOAT32_LIMIT if x.dtype == mx.float32 else BFLOAT16_LIMIT


def error(output: str, got: mx.array, want: np.ndarray, limit: float | None = None) -> Error:
    """The error of a floating-point output."""
    return Error(output, relative_error(got, want), limit_of(got) if limit is None else limit)


def sample(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, evenly spread with both ends among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def take_rows(w: QuantizedWeight, rows: Sequence[int]) -> QuantizedWeight:
    """The matrix of some rows of a weight [N, K]."""
    index = mx.array(list(rows), mx.uint32)
    return QuantizedWeight.pack(w.weight[index], w.scales[index], w.biases[index], w.bits, w.group_size)


def expert_rows(w: QuantizedWeight, expert: int, rows: Sequence[int]) -> QuantizedWeight:
    """The matrix of some rows of one of the experts of a weight [E, N, K]."""
    one = QuantizedWeight.pack(w.weight[expert], w.scales[expert], w.biases[expert], w.bits, w.group_size)
    return take_rows(one, rows)


@dataclass(frozen=True)
class SeparateWeight:
    """A quantised weight as MLX's operations take it: three arrays, see `QuantizedWeight.pack`."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int


def split_rows(w: QuantizedWeight, sizes: Sequence[int]) -> tuple[SeparateWeight, ...]:
    """A joined weight as the separate ones that mlx-lm has, views of the same memory."""
    parts: list[SeparateWeight] = []
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        parts.append(SeparateWeight(w.weight[rows], w.scales[rows], w.biases[rows], w.bits, w.group_size))
        start += size
    return tuple(parts)


def packed_bytes(weights: int, bits: int = 4, group_size: int = 64) -> int:
    """Bytes of so many quantised weights: codes, and a scale and a bias for each group."""
    return weights * bits // 8 + weights // group_size * 4
