"""Agreement with mlx-lm's own functions, on its path without custom kernels.

In float32 mlx-lm computes what the kernels define, so the difference is one rounding to bfloat16. In
bfloat16, as it runs, it also rounds after each operation.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from mlx_lm.models.qwen3_next import Qwen3NextRMSNormGated

from lily_mlx.kernels import deltanet
from tests.support import BFLOAT16_TOLERANCE, assert_close, bf16, rng, to_numpy

from .layer import Layer, assert_rounded_once, float32, heads_id, random_layer

MIXED = [(1, 2), (2, 4)]


def mlx_lm_prepare(layer: Layer, dtype: mx.Dtype):
    """q, k, v, a and b as mlx_lm.models.qwen3_5.GatedDeltaNet makes them."""
    shape, rows = layer.shape, layer.proj.shape[0]
    convolution = nn.Conv1d(shape.channels, shape.channels, 4, bias=False, groups=shape.channels)
    convolution.weight = layer.conv_weight.T[:, :, None].astype(dtype)
    proj = layer.proj.astype(dtype)
    window = mx.concatenate([layer.conv_state.astype(dtype), proj[:, : shape.channels]])
    x = nn.silu(convolution(window[None]))
    keys = shape.key_heads * shape.key_dim
    q, k, v = mx.split(x, [keys, 2 * keys], -1)
    q, k = (part.reshape(1, rows, shape.key_heads, shape.key_dim) for part in (q, k))
    q, k = normalize_qk(q, k, inv_scale=shape.key_dim**-0.5, eps=1e-6)
    a, b = proj[None, :, shape.a_offset :], proj[None, :, shape.b_offset : shape.a_offset]
    return q, k, v.reshape(1, rows, shape.value_heads, shape.value_dim), a, b


def mlx_lm_update(layer: Layer, dtype: mx.Dtype):
    """y and state of mlx-lm's delta rule."""
    return gated_delta_update(
        *mlx_lm_prepare(layer, dtype),
        layer.a_log,
        layer.dt_bias.astype(dtype),
        layer.state[None],
        use_kernel=False,
    )


def our_update(layer: Layer):
    *prepared, _ = deltanet.prepare(layer.proj, *layer.convolution, layer.shape)
    return deltanet.scan(*prepared, layer.state, layer.shape)


@pytest.mark.parametrize("heads", MIXED, ids=heads_id)
def test_prepare_in_float32(heads):
    layer = random_layer(1, heads, 6)
    ours = deltanet.prepare(layer.proj, *layer.convolution, layer.shape)
    theirs = mlx_lm_prepare(layer, mx.float32)
    for name, got, want in zip("qkv", ours, theirs, strict=False):
        assert_rounded_once(name, got, to_numpy(want[0]), slack=1e-6)


@pytest.mark.parametrize("heads", MIXED, ids=heads_id)
def test_scan_in_float32(heads):
    """The same rounded q, k and v, so that only the delta rule differs."""
    layer = random_layer(2, heads, 6)
    *prepared, _ = deltanet.prepare(layer.proj, *layer.convolution, layer.shape)
    y, state = deltanet.scan(*prepared, layer.state, layer.shape)
    q, k, v = (x.astype(mx.float32)[None] for x in prepared[:3])
    *_, a, b = mlx_lm_prepare(layer, mx.float32)
    want_y, want_state = gated_delta_update(
        q, k, v, a, b, layer.a_log, layer.dt_bias, layer.state[None], use_kernel=False
    )
    assert_close("state", state, to_numpy(want_state[0]), 2e-6)
    assert_rounded_once("y", y, to_numpy(want_y[0].reshape(y.shape)), slack=2e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_chunk(dtype):
    layer = random_layer(3, (1, 2), 12)
    y, state = our_update(layer)
    want_y, want_state = mlx_lm_update(layer, dtype)
    assert_close("y", y, to_numpy(want_y[0].reshape(y.shape)), BFLOAT16_TOLERANCE)
    assert_close("state", state, to_numpy(want_state[0]), BFLOAT16_TOLERANCE)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_step(dtype):
    layer = random_layer(4, (1, 2), 1)
    conv_state, *rest = layer.convolution
    y, _, state = deltanet.step(layer.proj, conv_state, layer.state, *rest, layer.shape)
    want_y, want_state = mlx_lm_update(layer, dtype)
    assert_close("y", y, to_numpy(want_y[0].reshape(y.shape)), BFLOAT16_TOLERANCE)
    assert_close("state", state, to_numpy(want_state[0]), BFLOAT16_TOLERANCE)


def test_gated_norm():
    layer = random_layer(5, (1, 2), 4, z_is_nan=False)
    generator = rng(6)
    y, weight = bf16(generator.normal(size=(4, 256))), float32(generator.normal(size=128))
    out = deltanet.gated_norm(y, layer.proj, weight, layer.shape, 1e-6)
    norm = Qwen3NextRMSNormGated(128, eps=1e-6)
    norm.weight = weight
    z = layer.proj[:, layer.shape.z_offset : layer.shape.b_offset].reshape(4, 2, 128)
    want = norm(y.reshape(4, 2, 128).astype(mx.float32), z.astype(mx.float32))
    assert_rounded_once("out", out, to_numpy(want.reshape(4, 256)), slack=1e-6)
