"""One launch of a kernel, as the backends receive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mlx.core as mx

from .source import KernelText

TemplateValue: TypeAlias = int | bool | float | mx.Dtype
Size3: TypeAlias = tuple[int, int, int]


@dataclass(slots=True)
class Launch:
    """Everything that a backend needs to run a kernel once.

    `grid` and `threadgroup` count threads, as in `mx.fast.metal_kernel`; the grid is an exact multiple
    of the threadgroup. `checked` asks the `cpu` backend for its checks. `prepared` is shared by all launches that
    differ in their arrays' values and shapes at most: a backend keeps there, by its name, what it made for them.
    """

    text: KernelText
    inputs: Sequence[mx.array]
    template: Mapping[str, TemplateValue]
    grid: Size3
    threadgroup: Size3
    output_shapes: Sequence[Sequence[int]]
    output_dtypes: Sequence[mx.Dtype]
    checked: bool = False
    prepared: dict[str, Any] = field(default_factory=dict)


def float_constants(template: Mapping[str, TemplateValue]) -> str:
    """The declarations of a template's float values, which Metal does not take as template arguments."""
    return "".join(
        f"constant constexpr float {name} = {float_literal(value)};\n"
        for name, value in template.items()
        if isinstance(value, float)
    )


def float_literal(value: float) -> str:
    """A float32 literal, e.g. 1e-06f."""
    text = repr(float(value))
    return (text if "." in text or "e" in text else text + ".0") + "f"
