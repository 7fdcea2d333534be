"""Wrong arguments: one clear message each, before any launch."""

from __future__ import annotations

import mlx.core as mx
import pytest

from lily_mlx.kernels import deltanet
from lily_mlx.kernels.deltanet import DeltaNetShape
from lily_mlx.kernels.deltanet.checks import MAX_ROWS
from lily_mlx.kernels.deltanet.policy import Columns

from .layer import random_layer, shape_of


def test_offsets_of_the_full_model():
    shape = DeltaNetShape(16, 32, 128, 128, 4)
    assert shape.channels == 8192
    assert (shape.z_offset, shape.b_offset, shape.a_offset) == (8192, 12288, 12320)
    assert shape.projection_width == 12352


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 2, 128, 128, 4), "value_heads 2 must be a positive multiple of key_heads 0"),
        ((2, 3, 128, 128, 4), "value_heads 3 must be a positive multiple of key_heads 2"),
        ((2, 0, 128, 128, 4), "value_heads 0"),
        ((1, 1, 192, 128, 4), "key_dim 192"),
        ((1, 1, 128, 64, 4), "value_dim 64"),
        ((1, 1, 128, 128, 3), "conv_kernel 3 must be 4"),
    ],
)
def test_shape(sizes, message):
    with pytest.raises(ValueError, match=message):
        DeltaNetShape(*sizes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("proj", r"deltanet\.step: proj must be bfloat16 \[1, 772\], got float32 \[1, 772\]"),
        ("conv_state", r"conv_state must be bfloat16 \[3, 512\]"),
        ("state", r"state must be float32 \[2, 128, 128\], got bfloat16"),
        ("conv_weight", r"conv_weight must be bfloat16 \[4, 512\]"),
        ("a_log", r"a_log must be float32 \[2\], got bfloat16"),
        ("dt_bias", r"dt_bias must be float32 \[2\], got bfloat16"),
    ],
)
def test_step_dtype(name, message):
    layer = random_layer(1, (1, 2), 1)
    array = getattr(layer, name)
    setattr(layer, name, array.astype(mx.float32 if array.dtype == mx.bfloat16 else mx.bfloat16))
    conv_state, *rest = layer.convolution
    with pytest.raises(ValueError, match=message.replace("772", str(layer.shape.projection_width))):
        deltanet.step(layer.proj, conv_state, layer.state, *rest, layer.shape)


def test_step_of_two_rows():
    layer = random_layer(2, (1, 2), 2)
    conv_state, *rest = layer.convolution
    with pytest.raises(ValueError, match=r"proj must be bfloat16 \[1, "):
        deltanet.step(layer.proj, conv_state, layer.state, *rest, layer.shape)


@pytest.mark.parametrize("rows", [0, MAX_ROWS + 1])
def test_prepare_rows(rows):
    layer = random_layer(3, (1, 1), 1)
    proj = mx.zeros((rows, layer.shape.projection_width), mx.bfloat16)
    message = "at least one row" if rows == 0 else f"at most {MAX_ROWS}"
    with pytest.raises(ValueError, match=message):
        deltanet.prepare(proj, *layer.convolution, layer.shape)


@pytest.mark.parametrize("wrong", ["k", "v", "decay", "beta", "state"])
def test_scan_rows_disagree(wrong):
    shape = shape_of((1, 2))
    inputs = {
        "q": mx.zeros((3, 1, 128), mx.bfloat16),
        "k": mx.zeros((3, 1, 128), mx.bfloat16),
        "v": mx.zeros((3, 2, 128), mx.bfloat16),
        "decay": mx.zeros((3, 2)),
        "beta": mx.zeros((3, 2)),
        "state": mx.zeros((2, 128, 128)),
    }
    inputs[wrong] = inputs[wrong][:-1]
    with pytest.raises(ValueError, match=rf"deltanet\.scan: {wrong} must be"):
        deltanet.scan(*inputs.values(), shape)


def test_gated_norm_weight():
    shape = shape_of((1, 2))
    y, proj = mx.zeros((2, 256), mx.bfloat16), mx.zeros((2, shape.projection_width), mx.bfloat16)
    with pytest.raises(ValueError, match=r"norm_weight must be bfloat16 \[128\], got float16 \[128\]"):
        deltanet.gated_norm(y, proj, mx.zeros(128, mx.float16), shape, 1e-6)
    with pytest.raises(ValueError, match=r"y must be bfloat16 \[2, 256\], got bfloat16 \[1, 256\]"):
        deltanet.gated_norm(y[:1], proj, mx.zeros(128, mx.bfloat16), shape, 1e-6)


def short_inputs() -> dict[str, mx.array]:
    layer = random_layer(4, (1, 2), 2)
    names = ("conv_state", "conv_weight", "a_log", "dt_bias")
    inputs = {"proj": layer.proj, "state": layer.state, **dict(zip(names, layer.convolution, strict=True))}
    return inputs | {"norm_weight": mx.ones(128, mx.bfloat16)}


def batch_inputs() -> dict[str, mx.array]:
    inputs = short_inputs()
    return inputs | {name: mx.stack([inputs[name]] * 2) for name in ("conv_state", "state")}


SHORT = {deltanet.short_chunk: short_inputs, deltanet.batch_step: batch_inputs}


@pytest.mark.parametrize("function", SHORT, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("proj", mx.zeros((2, 1032), mx.bfloat16), "proj must be"),
        ("proj", mx.zeros((0, 772), mx.bfloat16), "at least one row"),
        ("conv_state", mx.zeros((2, 512), mx.bfloat16), "conv_state must be"),
        ("state", mx.zeros((1, 2, 128, 128)), "state must be"),
        ("conv_weight", mx.zeros((3, 512), mx.bfloat16), "conv_weight must be"),
        ("a_log", mx.zeros(2, mx.bfloat16), "a_log must be"),
        ("dt_bias", mx.zeros(3), "dt_bias must be"),
        ("norm_weight", mx.zeros(128, mx.float16), "norm_weight must be"),
        ("columns", Columns(lanes=8, columns=1, simdgroups=8), "columns shares 32 columns"),
    ],
    ids=["width", "no-rows", "window", "state", "weight", "a_log", "dt_bias", "norm", "columns"],
)
def test_short(function, name, wrong, message):
    inputs = SHORT[function]() | {name: wrong}
    with pytest.raises(ValueError, match=rf"deltanet\.{function.__name__}: .*{message}"):
        function(**inputs, shape=shape_of((1, 2)), eps=1e-6)
