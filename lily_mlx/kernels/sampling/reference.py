"""Output projection and token choice by their definition, in NumPy: the wrappers' names and arguments."""

from __future__ import annotations

import numpy as np

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear.reference import norm_project


def philox(key: tuple[int, int], counter: np.ndarray) -> np.ndarray:
    """Philox 4x32-10 (Salmon et al., 2011).

    Args:
        key: two 32-bit words.
        counter: uint32 [4, ...].

    Returns:
        uint32 [4, ...].
    """
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = counter.astype(np.uint64)
    for index in range(10):
        k0 = (key[0] + index * 0x9E3779B9) & 0xFFFFFFFF
        k1 = (key[1] + index * 0xBB67AE85) & 0xFFFFFFFF
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & mask,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & mask,
        )
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def noise(seed: int, position: int, tokens: int) -> np.ndarray:
    """Gumbel noise of token ids 0 to tokens - 1 at one position, float64 [tokens]."""
    counter = np.zeros((4, tokens), np.uint32)
    counter[0] = np.arange(tokens)
    counter[1] = position
    uniform = (philox((seed, 0), counter)[0] + 0.5) / 2.0**32
    return np.asarray(-np.log(-np.log1p(-uniform)))


def head(
    x: np.ndarray,
    norm_weight: np.ndarray,
    w: QuantizedWeight,
    eps: float,
    sampling: np.ndarray,
    seed: np.ndarray,
    position: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [1, V], and every token as a part of its own: values [V] and ids [V] for `select`."""
    logits = norm_project(x, norm_weight, w, eps)
    values = logits[0]
    temperature = float(sampling[0])
    if temperature > 0:
        values = values / temperature + noise(int(seed[0]), int(position[0]), values.size)
    return logits, values, np.arange(values.size, dtype=np.uint32)


def select(best_value: np.ndarray, best_index: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The index of the largest value, the lowest of equals, and position + 1."""
    values = np.where(np.isnan(best_value), -np.inf, best_value)
    return best_index[values == values.max()].min(keepdims=True), position + 1
