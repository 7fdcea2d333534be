"""The functions of `lily_mlx.kernels.sampling` as MLX operations; arguments and results are described there."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.sampling import RowControls
from lily_mlx.kernels.sampling.policy import SLICE
from lily_mlx.kernels.sampling.settings import UNFILTERED

from .linear import norm_project

__all__ = ["adjust", "choose_rows", "draw", "head", "select"]

_PART = 256  # tokens of a part of the vocabulary
_NO_TOKEN = 0xFFFFFFFF


def head(
    x: mx.array,
    norm_weight: mx.array,
    w: QuantizedWeight,
    eps: float,
    sampling: mx.array,
    seed: mx.array,
    position: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """Logits, and the best value and token of each part of the vocabulary."""
    logits = norm_project(x, norm_weight, w, eps, mx.float32)
    # Long vocabularies take larger parts, because `select` reads at most 4,096.
    part = max(_PART, -(-w.rows // 4096))
    return logits, *_best_of_parts(_noisy(logits[0], sampling[0], seed, position), part)


def select(best_value: mx.array, best_index: mx.array, position: mx.array) -> tuple[mx.array, mx.array]:
    """The index of the largest value, the lowest among equals, and position + 1."""
    values = mx.where(mx.isnan(best_value), mx.array(-mx.inf), best_value)
    return _lowest(best_index[None], (values == mx.max(values))[None]), position + 1


def adjust(
    logits: mx.array,
    tokens: mx.array,
    position: mx.array,
    recent: mx.array,
    bias_ids: mx.array,
    bias_values: mx.array,
    settings: mx.array,
    seed: mx.array,
    filtered: bool,
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """Bias and penalties, and what the choice needs of each part of the vocabulary."""
    vocabulary, slots, fed = logits.shape[1], recent.shape[0], tokens.shape[0]
    age = (position - mx.arange(slots, dtype=mx.int32)) & (slots - 1)  # 0: the token fed last; slots: a power of two
    after = mx.where(age < fed, tokens[mx.maximum(fed - 1 - age, 0)], recent)
    _, _, _, _, _, _, _, repetition, presence, frequency, *sizes = (settings[i] for i in range(13))

    def times(size: mx.array) -> mx.array:
        """How often each token is among the last `size`."""
        ids = mx.minimum(after, mx.array(vocabulary, mx.uint32))
        return mx.zeros(vocabulary + 1).at[ids].add((age < size).astype(mx.float32))[:vocabulary]

    bias = mx.zeros(vocabulary + 1).at[mx.minimum(bias_ids, mx.array(vocabulary, mx.uint32))].add(bias_values)
    values = logits[0] + bias[:vocabulary]
    penalised = mx.where(values < 0, values * repetition, values / repetition)
    values = mx.where(times(sizes[0]) > 0, penalised, values)
    values = values - mx.where(times(sizes[1]) > 0, presence, mx.array(0.0))
    values = values - mx.where(times(sizes[2]) > 0, frequency, mx.array(0.0)) * times(sizes[2])
    noisy = values if filtered else _noisy(values, settings[0], seed, position)
    best, index = _best_of_parts(noisy, SLICE)
    known = mx.where(mx.isnan(values), mx.array(-mx.inf), values)
    slices = mx.pad(known, (0, -vocabulary % SLICE), constant_values=-float("inf")).reshape(-1, SLICE)
    total = mx.sum(mx.exp(slices - best[:, None]), axis=1) if filtered else mx.zeros(best.shape)
    return values[None], after, best, index, total


def draw(
    logits: mx.array,
    largest: mx.array,
    total: mx.array,
    special_tokens: mx.array,
    settings: mx.array,
    seed: mx.array,
    position: mx.array,
) -> tuple[mx.array, mx.array, tuple[mx.array, mx.array, mx.array]]:
    """The drawn token, position + 1, and what was kept. `largest` and `total` only help a kernel to skip tokens."""
    temperature, top_p, log_min_p, least, top_k, xtc_probability, xtc_threshold = (settings[i] for i in range(7))
    values = mx.where(mx.isnan(logits[0]), mx.array(-mx.inf), logits[0])
    ids = _by_falling_value(values)
    values = values[ids]
    weights = mx.where(values == values[0], mx.array(1.0), mx.exp(values - values[0]))
    rank = mx.arange(values.size)
    keep = mx.cumsum(weights) - weights < top_p * mx.sum(weights)
    keep = values >= mx.min(mx.where(keep | (rank == 0), values, mx.array(mx.inf)))
    keep = keep & ((values >= values[0] + log_min_p) | (rank < least))
    coin = (_philox(seed, 1, mx.zeros(1, mx.uint64), position) >> 8).astype(mx.float32) / 2.0**24
    probabilities = mx.where(keep, weights, mx.array(0.0)) / mx.sum(mx.where(keep, weights, mx.array(0.0)))
    above = keep & (probabilities > xtc_threshold) & (xtc_probability > 0) & (coin <= xtc_probability)
    highest = mx.min(mx.where(above, values, mx.array(mx.inf)))
    special = mx.any(ids[:, None] == special_tokens[None], axis=1)
    keep = keep & ((values <= highest) | special)
    keep = keep & (mx.cumsum(keep.astype(mx.float32)) <= top_k)
    noisy = _noisy(values, temperature, seed, position, ids)
    noisy = mx.where(keep, noisy, mx.array(-mx.inf))
    token = _lowest(ids[None], (keep & (noisy == mx.max(noisy)))[None])
    lowest = mx.min(mx.where(keep, values, mx.array(mx.inf)), keepdims=True)
    last = mx.max(mx.where(keep & (values == lowest), ids, mx.array(0, mx.uint32)), keepdims=True)
    return token, position + 1, (lowest, last, highest.reshape(1))


def choose_rows(
    logits: mx.array, tokens: mx.array, position: mx.array, recent: mx.array, controls: RowControls
) -> tuple[mx.array, mx.array, mx.array]:
    """The next token of each sequence, the adjusted logits and the memories with the tokens, one after another."""
    chosen = []
    for row in range(logits.shape[0]):
        one, settings = slice(row, row + 1), controls.settings[row]
        at, seed = position[one], controls.seed[one]
        given = logits[one], tokens[one], at, recent[row], controls.bias_ids[row], controls.bias_values[row], settings
        adjusted, after, best, index, _ = adjust(*given, seed, False)
        token, _ = select(best, index, at)
        if controls.filtered:
            drawn, _, _ = draw(adjusted, best, best, controls.special_tokens[row], settings, seed, at)
            token = mx.where(settings[UNFILTERED] > 0, token, drawn)
        chosen.append((token, adjusted, after[None]))
    token, adjusted, after = (mx.concatenate(parts) for parts in zip(*chosen, strict=True))
    return token, adjusted, after


def _by_falling_value(values: mx.array) -> mx.array:
    """Indices uint32 [n] by falling value, the lower index first among equals."""
    bits = (values + 0.0).view(mx.uint32)  # -0.0 becomes 0.0
    sign = mx.array(0x80000000, mx.uint32)
    rising = mx.where(bits >= sign, ~bits, bits | sign)
    order = (~rising).astype(mx.uint64) * 2**32 + mx.arange(values.size, dtype=mx.uint64)
    return (mx.sort(order) & mx.array(0xFFFFFFFF, mx.uint64)).astype(mx.uint32)


def _best_of_parts(values: mx.array, part: int) -> tuple[mx.array, mx.array]:
    """The largest value and its lowest index in each `part` values; NaN counts as minus infinity."""
    values = mx.where(mx.isnan(values), mx.array(-mx.inf), values)
    values = mx.pad(values, (0, -values.size % part), constant_values=-float("inf")).reshape(-1, part)
    ids = mx.arange(values.size, dtype=mx.uint32).reshape(values.shape)
    best = mx.max(values, axis=1)
    return best, _lowest(ids, values == best[:, None])


def _noisy(
    values: mx.array, temperature: mx.array, seed: mx.array, position: mx.array, ids: mx.array | None = None
) -> mx.array:
    """values / temperature + Gumbel noise of their tokens; the values themselves at temperature 0."""
    is_drawn = temperature > 0
    divisor = mx.where(is_drawn, temperature, mx.array(1.0))
    noise = _noise(seed, position, values.size)
    return values / divisor + mx.where(is_drawn, noise if ids is None else noise[ids], mx.array(0.0))


def _lowest(ids: mx.array, is_best: mx.array) -> mx.array:
    return mx.min(mx.where(is_best, ids, mx.array(_NO_TOKEN, mx.uint32)), axis=1)


def _noise(seed: mx.array, position: mx.array, tokens: int) -> mx.array:
    """Gumbel noise of token ids 0 to tokens - 1, float32 [tokens]: that of the kernel, kernels/sampling/random.h."""
    bits = _philox(seed, 0, mx.arange(tokens, dtype=mx.uint64), position)
    v = mx.minimum((bits.astype(mx.float32) + 0.5) / 2.0**32, mx.array(0.99999994))
    return -mx.log(-mx.log1p(-v))


def _philox(seed: mx.array, high_key: int, counter: mx.array, position: mx.array) -> mx.array:
    """First word of Philox 4x32-10 (Salmon et al., 2011), key (seed, high_key), counters (counter, position, 0, 0)."""
    mask = mx.array(0xFFFFFFFF, mx.uint64)
    c0, c1 = counter, mx.broadcast_to(position.astype(mx.uint64), counter.shape)
    c2 = c3 = mx.zeros(counter.shape, mx.uint64)
    k0, k1 = seed.astype(mx.uint64), mx.array([high_key], mx.uint64)
    for _ in range(10):
        p0, p1 = c0 * mx.array(0xD2511F53, mx.uint64), c2 * mx.array(0xCD9E8D57, mx.uint64)
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0 = (k0 + mx.array(0x9E3779B9, mx.uint64)) & mask
        k1 = (k1 + mx.array(0xBB67AE85, mx.uint64)) & mask
    return c0.astype(mx.uint32)
