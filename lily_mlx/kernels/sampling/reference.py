"""Output projection and token choice by their definition, in NumPy: the wrappers' names and arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear.reference import norm_project

from .settings import Settings


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


def coin(seed: int, position: int) -> float:
    """The uniform number in [0, 1) that decides whether XTC drops tokens at one position."""
    counter = np.array([0, position, 0, 0], np.uint32)
    return float(philox((seed, 1), counter)[0] >> np.uint32(8)) / 2.0**24


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


def remember(recent: np.ndarray, tokens: np.ndarray, position: np.ndarray) -> np.ndarray:
    """`recent` after `tokens` have been fed, the last one at `position`: position p is remembered in slot p % R."""
    after = recent.copy()
    first = int(position[0]) - len(tokens) + 1
    for index, token in enumerate(tokens):
        after[(first + index) % len(recent)] = token
    return after


def adjust(
    logits: np.ndarray,
    tokens: np.ndarray,
    position: np.ndarray,
    recent: np.ndarray,
    bias_ids: np.ndarray,
    bias_values: np.ndarray,
    settings: Settings,
    seed: np.ndarray,
    filtered: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Adjusted logits [1, V], `recent` with `tokens`, and every token as a part of its own, see the wrapper."""
    vocabulary = logits.shape[1]
    after = remember(recent, tokens, position)
    # The tokens in the order in which they were fed, without empty slots.
    order = [after[p % len(recent)] for p in range(int(position[0]) - len(recent) + 1, int(position[0]) + 1)]
    history = np.array([token for token in order if token < vocabulary], np.int64)
    adjusted = logits[0].astype(np.float64)
    used = bias_ids < vocabulary
    adjusted[bias_ids[used]] += bias_values[used]
    repetition, presence, frequency = (history[max(0, history.size - size) :] for size in settings.contexts)
    repeated = np.unique(repetition)
    penalty = settings.repetition_penalty
    adjusted[repeated] = np.where(adjusted[repeated] < 0, adjusted[repeated] * penalty, adjusted[repeated] / penalty)
    adjusted[np.unique(presence)] -= settings.presence_penalty
    for token in frequency:
        adjusted[token] -= settings.frequency_penalty
    values = adjusted
    if settings.draws and not filtered:
        values = adjusted / settings.temperature + noise(int(seed[0]), int(position[0]), vocabulary)
    ids = np.arange(vocabulary, dtype=np.uint32)
    return adjusted[None], after, values, ids, np.ones(vocabulary)


def kept(
    logits: np.ndarray, settings: Settings, excluding: bool = False, special_tokens: Iterable[int] = ()
) -> np.ndarray:
    """Which tokens the filters keep, bool [V], for logits [V]; `excluding`: whether XTC drops tokens this time.

    Equal logits: top-p and min-p keep or drop all of them, numbers of tokens count the lower ids first.
    """
    values = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    order = np.lexsort((np.arange(values.size), -values))  # by logit, largest first, then by id
    weights = np.exp(values - values.max(), where=values < values.max(), out=np.ones(values.size))
    keep = np.ones(values.size, bool)
    if 0 < settings.top_p < 1:
        larger = np.concatenate([[0.0], np.cumsum(weights[order])[:-1]])
        dropped = order[larger >= settings.top_p * weights.sum()]
        if dropped.size:  # an equal of a kept token is kept
            least = values[np.setdiff1d(order, dropped)].min()
            keep &= values >= least
    if settings.min_p > 0:
        likely = values >= values.max() + np.log(settings.min_p)
        likely[order[: settings.min_tokens_to_keep]] = True
        keep &= likely
    if excluding:
        probabilities = np.where(keep, weights, 0) / weights[keep].sum()
        above = probabilities > settings.xtc_threshold
        if above.any():
            drop = probabilities > probabilities[above].min()
            drop[[token for token in special_tokens if token < values.size]] = False
            keep &= ~drop
    if settings.top_k > 0:
        kept_order = order[keep[order]]
        keep[kept_order[settings.top_k :]] = False
    return keep


def draw(
    logits: np.ndarray,
    largest: np.ndarray,
    total: np.ndarray,
    special_tokens: np.ndarray,
    settings: Settings,
    seed: np.ndarray,
    position: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The drawn token [1], position + 1, and which tokens were kept, bool [V]."""
    excluding = settings.xtc_probability > 0 and coin(int(seed[0]), int(position[0])) <= settings.xtc_probability
    keep = kept(logits[0], settings, excluding, special_tokens)
    values = np.where(np.isnan(logits[0]), -np.inf, logits[0].astype(np.float64)) / settings.temperature
    values = values + noise(int(seed[0]), int(position[0]), values.size)
    values = np.where(keep, values, -np.inf)
    candidates = np.flatnonzero(keep & (values == values.max()))
    return candidates[:1].astype(np.uint32), position + 1, keep


def choose_rows(
    logits: np.ndarray,
    tokens: np.ndarray,
    position: np.ndarray,
    recent: np.ndarray,
    settings: Sequence[Settings],
    seed: np.ndarray,
    bias_ids: np.ndarray,
    bias_values: np.ndarray,
    special_tokens: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The next token of each sequence [B], the adjusted logits [B, V] and the memories with the tokens."""
    chosen = []
    for row, own in enumerate(settings):
        at, key = position[row : row + 1], seed[row : row + 1]
        adjusted, after, values, ids, total = adjust(
            logits[row : row + 1], tokens[row : row + 1], at, recent[row], bias_ids[row], bias_values[row], own, key,
            own.filters,
        )  # fmt: skip
        if own.filters:
            token, _, _ = draw(adjusted, values, total, special_tokens[row], own, key, at)
        else:
            token, _ = select(values, ids, at)
        chosen.append((token[0], adjusted[0], after))
    token, adjusted, after = (np.stack(parts) for parts in zip(*chosen, strict=True))
    return token, adjusted, after
