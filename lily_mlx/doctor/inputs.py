"""Random inputs made by MLX, their exact values, and samples of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from lily_mlx.kernels.attention import TAIL_ROWS, AttentionShape, KVCache, capacity_for
from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear.weight import BFLOAT16_BITS
from lily_mlx.model.quantization import take_rows

__all__ = ["Source", "expected", "sample", "take_expert", "take_rows", "to_float64"]


class Source:
    """A stream of random arrays, the same for the same name."""

    def __init__(self, name: str):
        self._key = mx.random.key(zlib.crc32(name.encode()))

    def _next(self) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return key

    def normal(self, *shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        return mx.random.normal(shape, key=self._next()).astype(dtype)

    def uniform(self, low: float, high: float, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.random.uniform(low, high, shape, key=self._next()).astype(dtype)

    def gain(self, size: int) -> mx.array:
        """Weights of an RMSNorm, bfloat16 [size]."""
        return self.uniform(0.5, 1.5, size, dtype=mx.bfloat16)

    def tokens(self, below: int, count: int) -> mx.array:
        return mx.random.randint(0, below, (count,), dtype=mx.uint32, key=self._next())

    def weight(self, *shape: int, bits: int = 4, group_size: int = 64) -> QuantizedWeight:
        """A weight [..., N, K] whose values have about the deviation 1 / sqrt(K); with 16 bits it is not quantised."""
        *lead, columns = shape
        if bits == BFLOAT16_BITS:
            return QuantizedWeight.from_bfloat16(self.normal(*shape) * columns**-0.5)
        words = (*lead, columns * bits // 32)
        high, low = (mx.random.randint(0, 2**16, words, dtype=mx.uint32, key=self._next()) for _ in range(2))
        unit = math.sqrt(12 / columns) / 2**bits
        scales = (unit * self.uniform(0.5, 1.5, *lead, columns // group_size)).astype(mx.bfloat16)
        biases = (scales * (-(2**bits - 1) / 2)).astype(mx.bfloat16)
        return QuantizedWeight.pack((high << 16) | low, scales, biases, bits, group_size)

    def cache(self, length: int, shape: AttentionShape) -> KVCache:
        """The cache of `length` tokens; rows that it does not define hold NaN, which a kernel must not read."""
        tail = length % TAIL_ROWS
        before = length - tail

        def block(used: int, size: int) -> mx.array:
            rows = self.normal(shape.kv_heads, size, shape.head_dim)
            return mx.where((mx.arange(size) < used)[None, :, None], rows, mx.array(math.nan, mx.bfloat16))

        capacity = capacity_for(before)
        return KVCache(block(before, capacity), block(before, capacity), block(tail, TAIL_ROWS), block(tail, TAIL_ROWS))


def to_float64(x: mx.array) -> np.ndarray:
    """Values in float64; integers stay integers."""
    if mx.issubdtype(x.dtype, mx.floating):
        return np.array(x.astype(mx.float32)).astype(np.float64)
    return np.array(x).astype(np.int64)


def expected(reference: Callable[..., Any], *arguments: Any) -> Any:
    """What a reference function returns for a kernel's arguments."""
    return reference(*(to_float64(x) if isinstance(x, mx.array) else x for x in arguments))


def sample(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, evenly spread, with both ends among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def take_expert(w: QuantizedWeight, expert: int) -> QuantizedWeight:
    """One matrix of a stack [E, N, K]."""
    return QuantizedWeight.pack(w.weight[expert], w.scales[expert], w.biases[expert], w.bits, w.group_size)
