"""Linear kernels on random shapes, encodings, offsets and sizes of values, in checked mode."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from lily_mlx.kernels import linear
from lily_mlx.kernels.linear import reference
from tests.support import bf16, quantized, to_numpy

from .profile import assert_near, choice, formats, fuzz, offsets, placed, product_size, scales, seeds

pytestmark = pytest.mark.checked

EPS = 1e-6
BFLOAT16, FLOAT32 = 6e-3, 2e-5
# The largest step between neighbours of bfloat16, relative: a value may round to the other one than in the reference.
ONE_ROUNDING = 2.0**-7


def tolerance(dtype: mx.Dtype) -> float:
    return BFLOAT16 if dtype == mx.bfloat16 else FLOAT32


def normal(generator: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> mx.array:
    return bf16(scale * generator.standard_normal(shape))


def rounding(x: np.ndarray, dense: np.ndarray) -> float:
    """The change of a product when its largest term is rounded the other way."""
    return ONE_ROUNDING * float((np.abs(x).max() * np.abs(dense)).max())


dtypes = st.sampled_from((mx.bfloat16, mx.float32))


@fuzz(16, layout=formats(), rows=st.integers(1, 130), scale=scales(), dtype=dtypes, seed=seeds())
def test_norm_project(layout, rows, scale, dtype, seed):
    generator = np.random.default_rng(seed)
    bits, group, columns = layout
    w, dense = quantized(generator, (rows, columns), bits, group)
    x, gain = normal(generator, (1, columns), scale), bf16(generator.uniform(0.5, 1.5, columns))
    normed = reference.rms_norm(to_numpy(x), to_numpy(gain), EPS)
    want = reference.norm_project(to_numpy(x), to_numpy(gain), w, EPS)
    relative = tolerance(dtype) + rounding(normed, dense) / max(product_size(normed, dense), 1e-30)
    assert_near("out", linear.norm_project(x, gain, w, EPS, dtype), want, relative, product_size(normed, dense))


@fuzz(12, layout=formats(), rows=st.integers(1, 130), scale=scales(), seed=seeds())
def test_project_add(layout, rows, scale, seed):
    generator = np.random.default_rng(seed)
    bits, group, columns = layout
    w, dense = quantized(generator, (rows, columns), bits, group)
    x, residual = normal(generator, (1, columns), scale), normal(generator, (1, rows))
    want = reference.project_add(to_numpy(x), w, to_numpy(residual))
    assert_near("out", linear.project_add(x, w, residual), want, BFLOAT16, 1e-2 * product_size(to_numpy(x), dense))


@fuzz(
    8,
    layout=choice(((4, 64, 128), (5, 32, 96)), [(b, g, c) for b in (2, 3, 4, 6, 8) for g, c in ((32, 96), (64, 512))]),
    heads=choice((8, 32), (8, 16, 32)),
    before=choice((8,), (0, 8, 24, 256)),
    behind=st.integers(0, 9),
    rows=st.integers(1, 70),
    scale=scales(),
    seed=seeds(),
)
def test_gated_norm_project_add(layout, heads, before, behind, rows, scale, seed):
    """z stands somewhere inside the projection; nothing else of it may be read."""
    generator = np.random.default_rng(seed)
    bits, group, columns = layout
    w, dense = quantized(generator, (rows, columns), bits, group)
    proj = np.full((1, before + columns + behind), np.nan)
    proj[:, before : before + columns] = generator.standard_normal(columns) * 3
    y, gain = normal(generator, (1, columns), scale), bf16(generator.uniform(0.5, 1.5, heads))
    residual = normal(generator, (1, rows))
    got = linear.gated_norm_project_add(y, bf16(proj), before, gain, w, residual, EPS)
    want = reference.gated_norm_project_add(
        to_numpy(y), to_numpy(bf16(proj)), before, to_numpy(gain), w, to_numpy(residual), EPS
    )
    gated = np.full((1, columns), 3.0)
    assert_near("out", got, want, BFLOAT16, 4e-1 * product_size(gated, dense))


@fuzz(
    18,
    layout=formats(),
    tokens=st.integers(1, 70),
    rows=st.integers(1, 150),
    dtype=dtypes,
    has_residual=st.booleans(),
    offset=offsets(),
    seed=seeds(),
)
def test_matmul(layout, tokens, rows, dtype, has_residual, offset, seed):
    generator = np.random.default_rng(seed)
    bits, group, columns = layout
    w, dense = quantized(generator, (rows, columns), bits, group)
    x = placed(normal(generator, (tokens, columns)), offset)
    residual = placed(normal(generator, (tokens, rows)), offset) if has_residual else None
    got = linear.matmul(x, w, residual, dtype)
    # The weights are rounded to bfloat16 for the matrix instructions; apart from that float32 is exact here.
    rounded = reference.round_bfloat16(dense)
    want = to_numpy(x) @ rounded.T + (0.0 if residual is None else to_numpy(residual))
    assert_near("out", got, want, tolerance(dtype), product_size(to_numpy(x), dense))


@fuzz(
    8,
    columns=choice((8, 264), (8, 16, 24, 40, 64, 248, 256, 264, 512, 1000, 2048, 2056)),
    tokens=st.integers(1, 40),
    scale=scales(),
    offset=offsets(),
    seed=seeds(),
)
def test_rms_norm(columns, tokens, scale, offset, seed):
    generator = np.random.default_rng(seed)
    x = placed(normal(generator, (tokens, columns), scale), offset)
    gain = bf16(generator.uniform(-1.5, 1.5, columns))
    want = reference.rms_norm(to_numpy(x), to_numpy(gain), EPS)
    got = linear.rms_norm(x, gain, EPS)
    # Every value on its own: right to the last bit or its neighbour.
    assert np.all(np.abs(to_numpy(got) - want) <= ONE_ROUNDING * np.abs(want) + 1e-30)


@fuzz(8, layout=formats(), table=st.integers(8, 200), tokens=st.integers(1, 40), seed=seeds())
def test_embed(layout, table, tokens, seed):
    """Ids beyond the table read its last row."""
    generator = np.random.default_rng(seed)
    bits, group, columns = layout
    w, _ = quantized(generator, (table, columns), bits, group)
    ids = generator.integers(0, table, tokens)
    ids[generator.random(tokens) < 0.1] = generator.integers(table, 2**32)
    got = linear.embed(mx.array(ids.astype(np.uint32)), w)
    want = reference.embed(np.minimum(ids, table - 1), w)
    assert np.all(np.abs(to_numpy(got) - want) <= (0.5 + 1e-4) * ONE_ROUNDING * np.abs(want) + 1e-30)
