"""The weights of a model in the layout that the kernels read.

Projections that share an input are joined by rows, so that one launch computes all of them; the order of
the rows is given with each field. Norm weights are as in MLX checkpoints: the factor itself, not the
factor minus one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.moe import ExpertWeights

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class DeltaNetWeights:
    """A Gated DeltaNet mixer: key width Hk*Dk, value width Hv*Dv, C = 2*Hk*Dk + Hv*Dv channels.

    Attributes:
        in_norm: bfloat16 [H], the layer's input norm.
        in_proj: rows q | k | v (C together) | z (Hv*Dv) | b (Hv) | a (Hv), columns H.
        conv: bfloat16 [4, C], depthwise convolution by taps, oldest first.
        a_log: float32 [Hv], logarithm of the decay rate.
        dt_bias: float32 [Hv], added to `a` before the softplus.
        out_norm: bfloat16 [Dv], the gated norm's weight, shared by the heads.
        out_proj: rows H, columns Hv*Dv.
        gate_proj: rows b | a, which `in_proj` then lacks, where they are not quantised and the others are: these few
            rows would make the others four times as large. None: `in_proj` has all rows.
    """

    in_norm: mx.array
    in_proj: QuantizedWeight
    conv: mx.array
    a_log: mx.array
    dt_bias: mx.array
    out_norm: mx.array
    out_proj: QuantizedWeight
    gate_proj: QuantizedWeight | None = None


@dataclass(frozen=True)
class AttentionWeights:
    """A gated softmax attention mixer with heads of width D.

    Attributes:
        in_norm: bfloat16 [H], the layer's input norm.
        in_proj: rows q (for each query head D query rows, then D gate rows) | k | v, columns H.
        q_norm, k_norm: bfloat16 [D], norms of each query and key head.
        out_proj: rows H, columns Hq*D.
    """

    in_norm: mx.array
    in_proj: QuantizedWeight
    q_norm: mx.array
    k_norm: mx.array
    out_proj: QuantizedWeight


@dataclass(frozen=True)
class MoEWeights:
    """A mixture-of-experts block.

    Attributes:
        in_norm: bfloat16 [H], the layer's post-attention norm.
        router: rows of the E experts | the shared expert's gate, columns H.
        experts: the routed experts and the shared expert.
    """

    in_norm: mx.array
    router: QuantizedWeight
    experts: ExpertWeights


@dataclass(frozen=True)
class MLPWeights:
    """A gated MLP of intermediate size I, in place of a mixture of experts.

    Attributes:
        in_norm: bfloat16 [H], the layer's post-attention norm.
        gate, up: rows I, columns H, in one encoding.
        down: rows H, columns I.
    """

    in_norm: mx.array
    gate: QuantizedWeight
    up: QuantizedWeight
    down: QuantizedWeight


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer: a token mixer, then a mixture of experts or a gated MLP."""

    mixer: DeltaNetWeights | AttentionWeights
    mlp: MoEWeights | MLPWeights

    @property
    def moe(self) -> MoEWeights:
        """The mixture of experts.

        Raises:
            ValueError: the layer has a gated MLP.
        """
        if not isinstance(self.mlp, MoEWeights):
            raise ValueError("this layer has a gated MLP and no experts")
        return self.mlp


@dataclass(frozen=True)
class ModelWeights:
    """All weights. `head` is `embedding` itself where the checkpoint ties them."""

    embedding: QuantizedWeight
    layers: tuple[LayerWeights, ...]
    norm: mx.array
    head: QuantizedWeight


def arrays_of(tree: Any) -> list[mx.array]:
    """All arrays inside nested dataclasses and tuples, in the order of their fields."""
    arrays: list[mx.array] = []
    _collect(tree, arrays)
    return arrays


def with_arrays(tree: Tree, arrays: Iterable[mx.array]) -> Tree:
    """The same nesting with other arrays, in the order of `arrays_of`."""
    rebuilt: Tree = _rebuild(tree, iter(arrays))
    return rebuilt


def form_of(tree: Tree) -> Tree:
    """The same nesting with an empty array in every place: what `with_arrays` needs of a tree, without its memory."""
    return with_arrays(tree, [mx.zeros(0)] * len(arrays_of(tree)))


# These run for every generated token: the fields of a class are looked up once.
_known_fields: dict[type, tuple[str, ...]] = {}


def _field_names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass; none for another class."""
    names = _known_fields.get(kind)
    if names is None:
        names = _known_fields[kind] = tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()
    return names


def _collect(tree: Any, arrays: list[mx.array]) -> None:
    if isinstance(tree, mx.array):
        arrays.append(tree)
    elif isinstance(tree, tuple):
        for item in tree:
            _collect(item, arrays)
    else:
        for name in _field_names(type(tree)):
            _collect(getattr(tree, name), arrays)


def _rebuild(tree: Any, arrays: Iterator[mx.array]) -> Any:
    if isinstance(tree, mx.array):
        return next(arrays)
    if isinstance(tree, tuple):
        return tuple([_rebuild(item, arrays) for item in tree])
    names = _field_names(type(tree))
    return type(tree)(*[_rebuild(getattr(tree, name), arrays) for name in names]) if names else tree
