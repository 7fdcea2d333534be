"""Seeded random inputs with the scales of the synthetic checkpoint (`compare.synthetic`)."""

from __future__ import annotations

import math
import zlib

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight

SCALE_LOW, SCALE_HIGH = 0.5, 1.5
# Root mean square of a uniform number between them.
_SCALE_SIZE = math.sqrt((SCALE_HIGH**3 - SCALE_LOW**3) / 3)


class Source:
    """A stream of random arrays. The same seed and name give the same arrays, on any device of a kind."""

    def __init__(self, seed: int, name: str):
        self._key = mx.random.key(seed ^ zlib.crc32(name.encode()))

    def _next(self) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return key

    def normal(self, *shape: int, deviation: float = 1.0, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        """Normal numbers with mean 0."""
        return (deviation * mx.random.normal(shape, key=self._next())).astype(dtype)

    def uniform(self, low: float, high: float, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.random.uniform(low, high, shape, key=self._next()).astype(dtype)

    def gain(self, size: int) -> mx.array:
        """Weights of an RMSNorm, bfloat16 [size]."""
        return (1.0 + 0.1 * mx.random.normal((size,), key=self._next())).astype(mx.bfloat16)

    def integers(self, high: int, *shape: int) -> mx.array:
        """uint32 below `high`, at most 2^24."""
        return mx.random.randint(0, high, shape, dtype=mx.uint32, key=self._next())

    def logits(self, rows: int, experts: int) -> mx.array:
        """Router logits and, last, the shared expert's gate, float32 [rows, experts + 1].

        A row's router logits are all different and exact in bfloat16, so that every engine has to choose the
        same experts whatever it rounds.
        """
        order = mx.argsort(mx.random.uniform(shape=(rows, experts), key=self._next()), axis=-1)
        routed = (order.astype(mx.float32) - experts // 2) / 32
        return mx.concatenate([routed, self.normal(rows, 1).astype(mx.float32)], axis=-1)

    def weight(self, *shape: int, bits: int = 4, group_size: int = 64, gain: float = 1.0) -> QuantizedWeight:
        """A quantised weight [..., N, K] whose values have the deviation gain / sqrt(K)."""
        *lead, columns = shape
        words = (*lead, columns * bits // 32)
        # `randint` draws from 24-bit floats, so a word is made of two halves.
        high, low = (mx.random.randint(0, 2**16, words, dtype=mx.uint32, key=self._next()) for _ in range(2))
        # A uniform code of `bits` bits has the standard deviation 2^bits / sqrt(12).
        unit = gain / math.sqrt(columns) * math.sqrt(12) / 2**bits / _SCALE_SIZE
        scales = unit * self.uniform(SCALE_LOW, SCALE_HIGH, *lead, columns // group_size)
        scales = scales.astype(mx.bfloat16)
        biases = (scales * (-(2**bits - 1) / 2)).astype(mx.bfloat16)
        return QuantizedWeight.pack((high << 16) | low, scales, biases, bits, group_size)
