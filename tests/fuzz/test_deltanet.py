"""Gated DeltaNet kernels on random heads, chunk lengths, cuts and states, in checked mode."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from lily_mlx.kernels import deltanet
from lily_mlx.kernels.deltanet import reference
from lily_mlx.kernels.deltanet.policy import Columns
from tests.kernels.deltanet.layer import arrays, float32, same_bits, shape_of
from tests.support import bf16, to_numpy

from .profile import assert_near, choice, fuzz, offsets, placed, scales, seeds

pytestmark = pytest.mark.checked

EPS = 1e-6
heads = choice(((1, 2), (3, 3)), ((1, 1), (1, 2), (2, 4), (1, 4), (3, 3), (2, 8), (5, 10), (1, 7)))
states = st.sampled_from(("random", "zero", "large"))
# How simdgroups share a state: the policy's own, those of the GPUs, and others that divide a head.
_SPLITS = (None, Columns(8, 1, 8), Columns(8, 1, 4, 4))
_ALL_SPLITS = (
    *_SPLITS,
    *(
        Columns(lanes, columns, simdgroups, ahead)
        for lanes in (1, 2, 4, 8, 16)
        for columns in (1, 2)
        for simdgroups in (1, 2, 4, 8)
        for ahead in (1, 2, 4)
        if simdgroups * (32 // lanes) * columns <= 128
    ),
)
splits = choice(_SPLITS, _ALL_SPLITS)
# Those that give all columns of a head to one threadgroup.
_HEAD_SPLITS = (Columns(1, 1, 4), Columns(8, 2, 16), Columns(8, 4, 8), Columns(4, 2, 8))


def state_of(generator: np.random.Generator, kind: str, shape: deltanet.DeltaNetShape) -> mx.array:
    size = {"random": 1.0, "zero": 0.0, "large": 1e3}[kind]
    return float32(size * generator.standard_normal((shape.value_heads, shape.value_dim, shape.key_dim)))


def convolution(generator: np.random.Generator, shape: deltanet.DeltaNetShape, extreme: bool) -> tuple[mx.array, ...]:
    """Window, weight, a_log and dt_bias; extreme gates forget everything or nothing."""
    spread = 8.0 if extreme else 1.0
    return (
        bf16(generator.standard_normal((3, shape.channels))),
        bf16(0.5 * generator.standard_normal((4, shape.channels))),
        float32(spread * generator.uniform(-1, 1, shape.value_heads)),
        float32(spread * generator.standard_normal(shape.value_heads)),
    )


def projection(generator: np.random.Generator, rows: int, shape: deltanet.DeltaNetShape, scale: float) -> mx.array:
    proj = scale * generator.standard_normal((rows, shape.projection_width))
    proj[:, shape.z_offset : shape.b_offset] = np.nan  # nobody but the gated norm may read z
    return bf16(proj)


@fuzz(
    10,
    heads=heads,
    rows=st.integers(1, 70),
    tile=choice((None, 4), (None, 1, 3, 4, 16)),
    extreme=st.booleans(),
    scale=scales(),
    offset=offsets(),
    seed=seeds(),
)
def test_prepare(heads, rows, tile, extreme, scale, offset, seed):
    generator, shape = np.random.default_rng(seed), shape_of(heads)
    proj = placed(projection(generator, rows, shape, scale), offset)
    layer = convolution(generator, shape, extreme)
    got = deltanet.prepare(proj, *layer, shape, tile)
    want = reference.prepare(*arrays(proj, *layer), shape)
    for name, ours, theirs in zip(("q", "k", "v", "decay", "beta", "conv_state"), got, want, strict=True):
        assert_near(name, ours, theirs, 1e-4 if ours.dtype == mx.float32 else 6e-3)
    assert np.array_equal(to_numpy(got[5]), want[5]), "conv_state must be copied as it is"


@fuzz(
    10,
    heads=heads,
    rows=st.integers(1, 40),
    cut=st.integers(0, 39),
    state=states,
    split=splits,
    offset=offsets(),
    seed=seeds(),
)
def test_scan(heads, rows, cut, state, split, offset, seed):
    """The reference's values, and the same bits whether the rows come at once or in two chunks."""
    generator, shape = np.random.default_rng(seed), shape_of(heads)
    start = state_of(generator, state, shape)
    unit = generator.standard_normal((2, rows, shape.key_heads, shape.key_dim))
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    q, k = (placed(bf16(x), offset) for x in unit)
    v = placed(bf16(generator.standard_normal((rows, shape.value_heads, shape.value_dim))), offset)
    decay, beta = (placed(float32(generator.uniform(0, 1, (rows, shape.value_heads))), offset) for _ in range(2))
    y, last = deltanet.scan(q, k, v, decay, beta, start, shape, split)
    want_y, want_state = reference.scan(*arrays(q, k, v, decay, beta, start), shape)
    assert_near("y", y, want_y, 6e-3)
    assert_near("state", last, want_state, 1e-5)
    if 0 < cut < rows:
        first, middle = deltanet.scan(q[:cut], k[:cut], v[:cut], decay[:cut], beta[:cut], start, shape, split)
        second, end = deltanet.scan(q[cut:], k[cut:], v[cut:], decay[cut:], beta[cut:], middle, shape, split)
        assert same_bits(mx.concatenate([first, second]), y)
        assert same_bits(end, last)


@fuzz(8, heads=heads, state=states, split=splits, extreme=st.booleans(), scale=scales(), seed=seeds())
def test_step(heads, state, split, extreme, scale, seed):
    """The reference's values, and the same bits as a chunk of one row."""
    generator, shape = np.random.default_rng(seed), shape_of(heads)
    proj, start = projection(generator, 1, shape, scale), state_of(generator, state, shape)
    layer = convolution(generator, shape, extreme)
    y, conv, last = deltanet.step(proj, layer[0], start, *layer[1:], shape, split)
    want_y, want_conv, want_state = reference.step(*arrays(proj, layer[0], start, *layer[1:]), shape)
    assert np.array_equal(to_numpy(conv), want_conv)
    # q, k and v round to bfloat16 first, and the old value of a key is subtracted from its new one.
    size = float(np.abs(to_numpy(start)).max())
    assert_near("y", y, want_y, 2e-2, size)
    assert_near("state", last, want_state, 1e-2, size)
    *prepared, _ = deltanet.prepare(proj, *layer, shape)
    chunk_y, chunk_state = deltanet.scan(*prepared, start, shape)
    assert_near("y against a chunk of one row", y, to_numpy(chunk_y), 2e-2, size)
    assert_near("state against a chunk of one row", last, to_numpy(chunk_state), 1e-2, size)


@fuzz(8, heads=heads, rows=st.integers(1, 60), scale=scales(), float_norm=st.booleans(), offset=offsets(), seed=seeds())
def test_gated_norm(heads, rows, scale, float_norm, offset, seed):
    generator, shape = np.random.default_rng(seed), shape_of(heads)
    proj = np.full((rows, shape.projection_width), np.nan)
    proj[:, shape.z_offset : shape.b_offset] = 3 * generator.standard_normal((rows, shape.b_offset - shape.z_offset))
    y = placed(bf16(scale * generator.standard_normal((rows, shape.value_heads * shape.value_dim))), offset)
    gain = float32(generator.uniform(0.5, 1.5, shape.value_dim))
    gain = gain if float_norm else gain.astype(mx.bfloat16)
    proj = placed(bf16(proj), offset)
    got = deltanet.gated_norm(y, proj, gain, shape, EPS)
    assert_near("out", got, reference.gated_norm(*arrays(y, proj, gain), shape, EPS), 5e-3)


@fuzz(
    8,
    heads=heads,
    rows=st.integers(1, 40),
    state=states,
    split=choice(_HEAD_SPLITS, _HEAD_SPLITS),
    extreme=st.booleans(),
    scale=scales(),
    float_norm=st.booleans(),
    offset=offsets(),
    seed=seeds(),
)
def test_short_chunk(heads, rows, state, split, extreme, scale, float_norm, offset, seed):
    """The bits of `prepare`, `scan` and `gated_norm`."""
    generator, shape = np.random.default_rng(seed), shape_of(heads)
    proj = placed(bf16(scale * generator.standard_normal((rows, shape.projection_width))), offset)
    start, layer = state_of(generator, state, shape), convolution(generator, shape, extreme)
    gain = float32(generator.uniform(0.5, 1.5, shape.value_dim))
    gain = gain if float_norm else gain.astype(mx.bfloat16)
    got = deltanet.short_chunk(proj, layer[0], start, *layer[1:], gain, shape, EPS, split)
    *prepared, window = deltanet.prepare(proj, *layer, shape)
    y, last = deltanet.scan(*prepared, start, shape, Columns(split.lanes, 1, 1))
    want = deltanet.gated_norm(y, proj, gain, shape, EPS), window, last
    for name, ours, theirs in zip(("out", "conv_state", "state"), got, want, strict=True):
        assert same_bits(ours, theirs), name
