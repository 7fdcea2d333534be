"""Prefill: chunks of any length at any offset, equal to decode and to one long chunk."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import attention
from lily_mlx.kernels.attention import reference
from tests.support import assert_close, bf16, rng, round_bf16, to_numpy

from .layer import EPS, HEADS, attend, cache_of, norms, position_of, projection, random_rows, shape_of


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_prepare_matches_the_reference(heads, tokens):
    generator, shape = rng(tokens), shape_of(heads)
    proj, (q_norm, k_norm) = projection(generator, tokens, shape), norms(generator, shape)
    q, k = attention.prepare(proj, q_norm, k_norm, position_of(77), shape, EPS)
    want_q, want_k = reference.prepare(to_numpy(proj), to_numpy(q_norm), to_numpy(k_norm), np.array([77]), shape, EPS)
    assert_close("q", q, want_q, 4e-3)
    assert_close("k", k, want_k, 4e-3)


@pytest.mark.parametrize("offset", [0, 5, 127, 128, 300])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 37])
def test_attention_matches_the_reference(offset, tokens):
    check_chunk(shape_of(), offset, tokens, seed=1000 * offset + tokens)


@pytest.mark.parametrize("heads", list(HEADS.values())[1:], ids=list(HEADS.keys())[1:])
@pytest.mark.parametrize(("offset", "tokens"), [(0, 7), (120, 12)])
def test_attention_with_other_groups(heads, offset, tokens):
    check_chunk(shape_of(heads), offset, tokens, seed=offset + tokens)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_attention_with_other_head_sizes(head_dim):
    check_chunk(shape_of((4, 2), head_dim=head_dim, rotary_dim=16), 30, 21, seed=head_dim)


def test_large_scores_do_not_overflow():
    check_chunk(shape_of(), 100, 9, seed=3, key_scale=128.0)


def check_chunk(shape, offset, tokens, seed, key_scale=1.0):
    generator = rng(seed)
    proj = projection(generator, tokens, shape)
    keys, values = (random_rows(generator, offset + tokens, shape) for _ in range(2))
    keys = round_bf16(keys * key_scale)
    q = random_rows(generator, tokens, replace(shape, kv_heads=shape.query_heads))
    out = attention.prefill_attention(bf16(q), cache_of(keys, values, shape), position_of(offset), proj, shape)
    want = attend(q, keys, values, offset, proj, shape)
    assert_close("attention", out, want, 2e-2)


@pytest.mark.parametrize("split", [(40,), (1, 39), (7, 7, 26), (39, 1)], ids=str)
def test_chunks_equal_one_chunk_and_single_steps(split):
    generator, shape, offset = rng(9), shape_of((8, 1)), 110
    proj, (q_norm, k_norm) = projection(generator, 40, shape), norms(generator, shape)
    start = cache_of(random_rows(generator, offset, shape), random_rows(generator, offset, shape), shape)

    cache, length, parts = start, offset, []
    for rows in split:
        chunk = proj[length - offset : length - offset + rows]
        position = position_of(length)
        q, k = attention.prepare(chunk, q_norm, k_norm, position, shape, EPS)
        cache = attention.append(cache, k, chunk, position, length, shape)
        parts.append(attention.prefill_attention(q, cache, position, chunk, shape))
        length += rows
    by_chunks = mx.concatenate(parts)

    cache, steps = start, []
    for i in range(40):
        position = position_of(offset + i)
        q, tail_keys, tail_values = attention.step_prepare(proj[i : i + 1], q_norm, k_norm, position, cache, shape, EPS)
        cache = replace(cache, tail_keys=tail_keys, tail_values=tail_values)
        steps.append(attention.step_attention(q, cache, position, proj[i : i + 1], shape))
        if (offset + i + 1) % attention.TAIL_ROWS == 0:
            cache = attention.merge_tail(cache, offset + i + 1)
    assert_close("chunks against steps", by_chunks, to_numpy(mx.concatenate(steps)), 1e-2)
    assert np.isfinite(to_numpy(by_chunks)).all()
