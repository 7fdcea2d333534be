"""A Gated DeltaNet layer takes one launch for few rows and three for many: the numbers are the same."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels.deltanet import policy
from lily_mlx.model import Model
from lily_mlx.model.cache import DeltaNetCache
from lily_mlx.model.prefill import deltanet_chunk
from tests.support import BFLOAT16_TOLERANCE, assert_close, bf16, rng, to_numpy

from . import synthetic

MOST_SHORT = policy.short_rows("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    settings = synthetic.config(num_hidden_layers=2, full_attention_interval=2)
    return Model.load(synthetic.write_checkpoint(tmp_path_factory.mktemp("model"), settings))


@pytest.fixture
def cache(model) -> DeltaNetCache:
    """What a layer remembers of a sequence that has begun."""
    shape, generator = model.config.deltanet, rng(1)
    state = generator.normal(size=(shape.value_heads, shape.value_dim, shape.key_dim))
    return DeltaNetCache(bf16(generator.normal(size=(3, shape.channels))), mx.array(state.astype(np.float32)))


def rows_of(model: Model, count: int) -> mx.array:
    return bf16(rng(count).normal(size=(count, model.config.hidden_size)))


def layer(model: Model, x: mx.array, cache: DeltaNetCache, last_only: bool = False) -> tuple[mx.array, ...]:
    out, after = deltanet_chunk(model.weights.layers[0].mixer, model.config, x, cache, last_only=last_only)
    return out, after.conv, after.state


@pytest.mark.parametrize("rows", [1, 2, 17, MOST_SHORT])
def test_both_routes_have_the_same_bits(model, cache, monkeypatch, rows):
    x = rows_of(model, rows)
    short = layer(model, x, cache)
    monkeypatch.setattr(policy, "short_rows", lambda backend: 0)
    for ours, theirs in zip(short, layer(model, x, cache), strict=True):
        assert np.array_equal(to_numpy(ours), to_numpy(theirs))


@pytest.mark.parametrize("rows", [1, MOST_SHORT, MOST_SHORT + 1])
def test_the_last_row_alone(model, cache, rows):
    x = rows_of(model, rows)
    out, conv, state = layer(model, x, cache)
    last, last_conv, last_state = layer(model, x, cache, last_only=True)
    assert last.shape == (1, model.config.hidden_size)
    assert_close("last row", last, to_numpy(out[-1:]), BFLOAT16_TOLERANCE)
    assert np.array_equal(to_numpy(last_conv), to_numpy(conv))
    assert np.array_equal(to_numpy(last_state), to_numpy(state))


@pytest.mark.parametrize("sizes", [[64, 1], [1, 64], [32, 33], [13, 52]], ids=str)
def test_chunks_on_both_sides_of_the_boundary(model, cache, sizes):
    """65 rows at once, through three launches, and in short chunks."""
    x = rows_of(model, sum(sizes))
    assert x.shape[0] == MOST_SHORT + 1
    want, parts, start = layer(model, x, cache), [], 0
    for size in sizes:
        out, conv, state = layer(model, x[start : start + size], cache)
        cache = DeltaNetCache(conv, state)
        parts.append(out)
        start += size
    for name, ours, theirs in zip(("out", "conv", "state"), (mx.concatenate(parts), conv, state), want, strict=True):
        assert_close(name, ours, to_numpy(theirs), BFLOAT16_TOLERANCE)
