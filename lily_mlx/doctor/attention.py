"""Checks of the attention kernels. Rows of a cache that no sequence defines hold NaN."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from lily_mlx.fallback import kernel, replacement
from lily_mlx.kernels.attention import TAIL_ROWS, YOUNG_PAGE, AttentionShape, KVCache, PagedCache, make_work, reference

from .check import Check, Output, close, equal
from .inputs import Source, expected, sample, to_float64
from .sizes import EPS, Sizes

_TOKENS = 6  # of a chunk, compared one by one


def checks(sizes: Sizes) -> Iterator[Check]:
    """All checks of the family."""
    shape = sizes.attention
    label = f"{shape.query_heads} query and {shape.kv_heads} KV heads of {shape.head_dim}"
    for context in sizes.contexts:
        at = f"after {context} tokens, {label}"
        yield Check("attention.step", at, lambda c=context: _step(shape, c))  # type: ignore[misc]
        if context >= TAIL_ROWS:
            yield Check("attention.merge_tail", at, lambda c=context: _merge_tail(shape, c))  # type: ignore[misc]
        for rows in sizes.rows:
            chunk = f"{rows} rows {at}"
            yield Check("attention.append", chunk, lambda r=rows, c=context: _append(shape, r, c))  # type: ignore[misc]
            yield Check(
                "attention.prefill_attention",
                chunk,
                lambda r=rows, c=context: _prefill_attention(shape, r, c),  # type: ignore[misc]
            )
    lengths = (0, 127, max(sizes.contexts))
    yield Check("attention.batch_step", f"after {lengths} tokens, {label}", lambda: _batch_step(shape, lengths))
    for rows in sizes.rows:
        yield Check("attention.prepare", f"{rows} rows, {label}", lambda r=rows: _prepare(shape, r, 262_000))  # type: ignore[misc]


def _position(value: int) -> mx.array:
    return mx.array([value], mx.int32)


def _numpy(cache: KVCache) -> reference.KVCache:
    return reference.KVCache(*(to_float64(array) for array in vars(cache).values()))


def _prepare(shape: AttentionShape, rows: int, position: int) -> list[Output]:
    source = Source(f"attention.prepare {rows}")
    proj, gains = (
        source.normal(rows, shape.projection_width),
        (source.gain(shape.head_dim), source.gain(shape.head_dim)),
    )
    got = kernel("attention.prepare")(proj, *gains, _position(position), shape, EPS)
    want = expected(reference.prepare, proj, *gains, _position(position), shape, EPS)
    return [close(name, ours, theirs) for name, ours, theirs in zip("qk", got, want, strict=True)]


def _step(shape: AttentionShape, context: int) -> list[Output]:
    source = Source(f"step {context}")
    proj, gains = source.normal(1, shape.projection_width), (source.gain(shape.head_dim), source.gain(shape.head_dim))
    cache, row = source.cache(context, shape), context % TAIL_ROWS
    out, after = kernel("attention.step")(proj, *gains, _position(context), cache, shape, EPS)
    want, want_after = expected(reference.step, proj, *gains, _position(context), _numpy(cache), shape, EPS)
    return [
        close("out", out, want),
        close("k", after.tail_keys[:, row], want_after.tail_keys[:, row]),
        equal("older keys", after.tail_keys[:, :row], want_after.tail_keys[:, :row]),
        equal("values", after.tail_values[:, : row + 1], want_after.tail_values[:, : row + 1]),
    ]


def _batch_step(shape: AttentionShape, lengths: tuple[int, ...]) -> list[Output]:
    """Sequences of these lengths, whose pages lie backwards in the pool, but for the longest's last, which is young."""
    source = Source(f"batch_step {lengths}")
    proj, gains = (
        source.normal(len(lengths), shape.projection_width),
        (source.gain(shape.head_dim), source.gain(shape.head_dim)),
    )
    caches = [source.cache(length, shape) for length in lengths]
    counts = [length // TAIL_ROWS for length in lengths]
    ends = np.cumsum(counts)
    pages = [list(range(end - 1, end - 1 - count, -1)) for end, count in zip(ends.tolist(), counts, strict=True)]

    longest = int(np.argmax(lengths))
    pages[longest][-1:] = [YOUNG_PAGE]

    def pool(name: str) -> mx.array:
        unused = mx.full((1, shape.kv_heads, TAIL_ROWS, shape.head_dim), mx.nan, mx.bfloat16)
        blocks = []
        for cache, count in zip(caches, counts, strict=True):
            own = getattr(cache, name)[:, : count * TAIL_ROWS].reshape(shape.kv_heads, count, TAIL_ROWS, shape.head_dim)
            blocks.append(own.swapaxes(0, 1)[::-1])
        return mx.concatenate([*blocks, unused])

    def young(name: str) -> mx.array:
        own = getattr(caches[longest], name)[:, (counts[longest] - 1) * TAIL_ROWS : counts[longest] * TAIL_ROWS]
        nothing = mx.full(own.shape, mx.nan, mx.bfloat16)
        return mx.stack([own if row == longest else nothing for row in range(len(lengths))])

    tails = (mx.stack([getattr(cache, name) for cache in caches]) for name in ("tail_keys", "tail_values"))
    cache = PagedCache(pool("keys"), pool("values"), young("keys"), young("values"), *tails)
    out, after = kernel("attention.batch_step")(proj, *gains, make_work(lengths, pages), cache, shape, EPS)
    held = reference.PagedCache(*(to_float64(array) for array in vars(cache).values()))
    want, want_after = expected(reference.batch_step, proj, *gains, lengths, pages, held, shape, EPS)
    outputs = [close("out", out, want)]
    for row, length in enumerate(lengths):
        new = length % TAIL_ROWS
        keys, values = after.tail_keys[row], after.tail_values[row]
        outputs += [
            close("k", keys[:, new], want_after.tail_keys[row][:, new]),
            equal("older keys", keys[:, :new], want_after.tail_keys[row][:, :new]),
            equal("values", values[:, : new + 1], want_after.tail_values[row][:, : new + 1]),
        ]
    return outputs


def _rows(cache: KVCache, length: int) -> tuple[np.ndarray, np.ndarray]:
    return reference.rows(_numpy(cache), length)


def _append(shape: AttentionShape, rows: int, context: int) -> list[Output]:
    source = Source(f"append {rows} {context}")
    proj, k = source.normal(rows, shape.projection_width), source.normal(rows, shape.kv_heads, shape.head_dim)
    cache = source.cache(context, shape)
    got = kernel("attention.append")(cache, k, proj, _position(context), context, shape)
    want = expected(reference.append, _numpy(cache), k, proj, _position(context), context, shape)
    found, wanted = _rows(got, context + rows), reference.rows(want, context + rows)
    return [equal(name, ours, theirs) for name, ours, theirs in zip(("keys", "values"), found, wanted, strict=True)]


def _merge_tail(shape: AttentionShape, context: int) -> list[Output]:
    length = context - context % TAIL_ROWS
    source = Source(f"merge_tail {context}")
    main = source.cache(length - TAIL_ROWS, shape)
    tails = [source.normal(shape.kv_heads, TAIL_ROWS, shape.head_dim) for _ in range(2)]
    cache = KVCache(main.keys, main.values, *tails)
    got = kernel("attention.merge_tail")(cache, length)
    found, wanted = _rows(got, length), reference.rows(reference.merge_tail(_numpy(cache), length), length)
    return [equal(name, ours, theirs) for name, ours, theirs in zip(("keys", "values"), found, wanted, strict=True)]


def _prefill_attention(shape: AttentionShape, rows: int, context: int) -> list[Output]:
    source = Source(f"prefill_attention {rows} {context}")
    q, proj = source.normal(rows, shape.query_heads, shape.head_dim), source.normal(rows, shape.projection_width)
    k = source.normal(rows, shape.kv_heads, shape.head_dim)
    position = _position(context)
    cache = replacement("attention.append")(source.cache(context, shape), k, proj, position, context, shape)
    got = kernel("attention.prefill_attention")(q, cache, position, proj, shape)
    taken = sample(rows, _TOKENS)
    keys, values = _rows(cache, context + rows)
    gates = reference.split_projection(to_float64(proj), shape)[1]
    queries = to_float64(q)
    want = [reference.attend(queries[t : t + 1], keys, values, context + t, gates[t : t + 1], shape) for t in taken]
    return [close("out", got[mx.array(taken)], np.concatenate(want))]
