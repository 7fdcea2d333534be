"""Weights without memory, for tracing a model of any size."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from lily_mlx.kernels.linear.weight import BFLOAT16_BITS, NO_GROUPS

from .checkpoint import assemble
from .config import ModelConfig
from .layout import linear_shapes, plain_shapes
from .tensors import canonical_name
from .weights import ModelWeights


def abstract_weights(config: ModelConfig) -> ModelWeights:
    """Weights of the shapes and encodings that a configuration implies.

    They are zeros that nothing computes until they are evaluated, so they take no memory.
    """
    tensors = _AbstractTensors(config)
    return assemble(tensors, tensors.encodings, config, evaluate=lambda arrays: None)


class _AbstractTensors:
    def __init__(self, config: ModelConfig):
        self._linears = linear_shapes(config)
        self._plains = plain_shapes(config)
        overrides = {canonical_name(path): value for path, value in config.quantization.items()}
        self.encodings: dict[str, tuple[int, int]] = {}
        for path in self._linears:
            override = overrides.get(path)
            if not config.quantization or override is False:
                self.encodings[path] = (BFLOAT16_BITS, NO_GROUPS)
                continue
            encoding = {**config.quantization, **(override if isinstance(override, Mapping) else {})}
            self.encodings[path] = (encoding["bits"], encoding["group_size"])

    def take(self, name: str) -> mx.array:
        if name in self._plains:
            return mx.zeros(self._plains[name], mx.bfloat16)
        path, _, part = name.rpartition(".")
        *lead, columns = self._linears[path]
        bits, group_size = self.encodings[path]
        if bits == BFLOAT16_BITS:
            return mx.zeros((*lead, columns), mx.bfloat16)
        if part == "weight":
            return mx.zeros((*lead, columns * bits // 32), mx.uint32)
        return mx.zeros((*lead, columns // group_size), mx.bfloat16)
