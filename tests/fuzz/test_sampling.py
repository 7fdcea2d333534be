"""Output projection and token choice on random vocabularies, temperatures and ties, in checked mode."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear.reference import rms_norm
from lily_mlx.kernels.sampling import head, reference, select
from tests.support import bf16, quantized, to_numpy

from .profile import assert_near, formats, fuzz, product_size, seeds
from .test_linear import FLOAT32, rounding

pytestmark = pytest.mark.checked

EPS = 1e-6


@fuzz(
    14,
    layout=formats(),
    vocabulary=st.integers(8, 700),
    temperature=st.sampled_from((0.0, 0.0, 0.3, 1.0, 5.0)),
    repeated=st.booleans(),
    key=st.integers(0, 2**32 - 1),
    position=st.integers(0, 262_143),
    seed=seeds(),
)
def test_head_and_select(layout, vocabulary, temperature, repeated, key, position, seed):
    """The chosen token is the best one; among equal logits (repeated rows) the lowest."""
    generator = np.random.default_rng(seed)
    bits, group, columns = layout
    w, dense = quantized(generator, (vocabulary, columns), bits, group)
    if repeated:
        rows = mx.array(generator.integers(0, 3, vocabulary).astype(np.uint32))
        w = QuantizedWeight.pack(w.weight[rows], w.scales[rows], w.biases[rows], bits, group)
        dense = dense[to_numpy(rows)]
    x, gain = bf16(generator.standard_normal((1, columns))), bf16(generator.uniform(0.5, 1.5, columns))
    sampling = np.zeros(8, np.float32)
    sampling[0] = temperature
    arguments = (mx.array(sampling), mx.array([key], mx.uint32), mx.array([position], mx.int32))
    logits, best_value, best_index = head(x, gain, w, EPS, *arguments)
    want, *_ = reference.head(to_numpy(x), to_numpy(gain), w, EPS, *(np.array(a) for a in arguments))
    normed = rms_norm(to_numpy(x), to_numpy(gain), EPS)
    size = product_size(normed, dense)
    assert_near("logits", logits, want, FLOAT32 + rounding(normed, dense) / size, size)

    token, following = select(best_value, best_index, arguments[2])
    assert int(following.item()) == position + 1
    values = to_numpy(logits)[0]
    if temperature == 0:
        assert int(token.item()) == int(np.argmax(values))
        return
    noisy = values / temperature + reference.noise(key, position, vocabulary)
    lead = noisy.max() - noisy[int(token.item())]
    assert lead <= 1e-5 * max(1.0, float(np.abs(noisy).max())), f"the chosen token is {lead} behind the best"


@fuzz(
    12,
    parts=st.one_of(st.integers(1, 40), st.integers(1, 4096)),
    kind=st.sampled_from(("normal", "ties", "infinite", "missing")),
    position=st.integers(0, 262_143),
    seed=seeds(),
)
def test_select(parts, kind, position, seed):
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(parts)
    if kind == "ties":
        values = np.round(values)
    elif kind == "infinite":
        values[generator.random(parts) < 0.5] = -np.inf
    elif kind == "missing":
        values[1:][generator.random(parts - 1) < 0.5] = np.nan
    values[0] = max(values[0], -2.0)
    index = generator.permutation(3 * parts)[:parts]
    value = mx.array(values.astype(np.float32))
    got = select(value, mx.array(index.astype(np.uint32)), mx.array([position], mx.int32))
    want = reference.select(to_numpy(value), index, np.array([position]))
    for ours, theirs in zip(got, want, strict=True):
        assert np.array_equal(to_numpy(ours), theirs)
