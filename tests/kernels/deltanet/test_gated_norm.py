"""`gated_norm`: RMSNorm of each value head times silu(z)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import deltanet
from lily_mlx.kernels.deltanet import reference
from tests.support import bf16, rng, to_numpy

from .layer import HEADS, ROWS, arrays, assert_rounded_once, float32, heads_id, rows_id, shape_of

EPS = 1e-6


def random_inputs(seed, heads, rows):
    """y, the projection with NaN everywhere but in z, and the weight."""
    generator, shape = rng(seed), shape_of(heads)
    proj = np.full((rows, shape.projection_width), np.nan)
    proj[:, shape.z_offset : shape.b_offset] = generator.normal(size=(rows, shape.value_heads * 128)) * 3
    y = generator.normal(size=(rows, shape.value_heads * 128))
    return shape, [bf16(y), bf16(proj), bf16(generator.normal(size=128))]


def check(shape, inputs, eps=EPS) -> mx.array:
    out = deltanet.gated_norm(*inputs, shape, eps)
    assert out.dtype == mx.bfloat16
    assert_rounded_once("out", out, reference.gated_norm(*arrays(*inputs), shape, eps), slack=1e-7)
    return out


@pytest.mark.parametrize("rows", ROWS, ids=rows_id)
def test_rows(rows):
    check(*random_inputs(1, (1, 2), rows))


@pytest.mark.parametrize("heads", HEADS, ids=heads_id)
def test_heads(heads):
    check(*random_inputs(2, heads, 3))


def test_float32_weight():
    shape, (y, proj, _) = random_inputs(3, (1, 2), 3)
    check(shape, [y, proj, float32(rng(4).normal(size=128))])


def test_zero_head():
    shape, (y, proj, weight) = random_inputs(5, (1, 2), 2)
    y = to_numpy(y)
    y[0, :128] = 0
    out = check(shape, [bf16(y), proj, weight])
    assert not to_numpy(out)[0, :128].any()


def test_extreme_z():
    shape, (y, proj, weight) = random_inputs(6, (1, 1), 4)
    proj = to_numpy(proj)
    proj[:, shape.z_offset : shape.b_offset] = np.array([-300, -60, 60, 300])[:, None]
    check(shape, [y, bf16(proj), weight])


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1.0])
def test_eps(eps):
    shape, (y, proj, weight) = random_inputs(7, (1, 1), 2)
    check(shape, [bf16(to_numpy(y) * 1e-2), proj, weight], eps)
