"""The decode kernels of the linear family against their reference."""

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import linear
from lily_mlx.kernels.linear import QuantizedWeight, reference
from tests.kernels.linear.weights import integer_weight
from tests.support import (
    BFLOAT16_TOLERANCE,
    FLOAT32_TOLERANCE,
    assert_close,
    bf16,
    quantized,
    relative_error,
    rng,
    round_bf16,
    to_numpy,
)

EPS = 1e-6
ROW_COUNTS = (1, 3, 4, 5, 7, 8, 9, 15, 33, 130)


def row(generator, columns, scale=1.0):
    return bf16(generator.standard_normal((1, columns)) * scale)


def gain(generator, columns):
    return bf16(generator.uniform(0.5, 1.5, columns))


def check_project_add(rows, columns, bits, group_size):
    generator = rng(rows * 7919 + columns + bits)
    weight, _ = quantized(generator, (rows, columns), bits, group_size)
    x, residual = row(generator, columns), row(generator, rows)
    got = linear.project_add(x, weight, residual)
    assert got.dtype == mx.bfloat16
    want = reference.project_add(to_numpy(x), weight, to_numpy(residual))
    assert_close("out", got, want, BFLOAT16_TOLERANCE / 4)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 7, 33])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_project_add_small_and_odd_row_counts(bits, group_size, rows):
    """A published class of errors: MLX once gave NaN for 4 rows and a zero last row for 33."""
    check_project_add(rows, 4096, bits, group_size)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("columns", [32, 64, 96, 192, 320, 544, 608, 2048, 2080])
def test_project_add_any_multiple_of_32_columns(columns, bits):
    for rows in (3, 33):
        check_project_add(rows, columns, bits, 32)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("out_dtype", [mx.bfloat16, mx.float32], ids=["bfloat16", "float32"])
def test_norm_project_row_counts(out_dtype, rows):
    generator = rng(rows)
    weight, _ = quantized(generator, (rows, 256), 4, 64)
    x, norm_weight = row(generator, 256), gain(generator, 256)
    got = linear.norm_project(x, norm_weight, weight, EPS, out_dtype)
    assert got.dtype == out_dtype
    want = reference.norm_project(to_numpy(x), to_numpy(norm_weight), weight, EPS)
    assert_close("out", got, want, BFLOAT16_TOLERANCE / 4 if out_dtype == mx.bfloat16 else FLOAT32_TOLERANCE)


@pytest.mark.parametrize(
    ("rows", "columns", "bits", "group_size"),
    [
        pytest.param(100, 2048, 4, 64, id="full-size projection"),
        pytest.param(257, 2048, 8, 64, id="full-size router"),
        pytest.param(17, 256, 8, 64, id="tiny router"),
        pytest.param(1544, 256, 4, 64, id="tiny DeltaNet projection"),
        pytest.param(5, 8192, 4, 128, id="most columns"),
        pytest.param(33, 32, 2, 32, id="fewest columns"),
        pytest.param(40, 96, 3, 32, id="3 bits"),
        pytest.param(40, 320, 5, 64, id="5 bits"),
        pytest.param(40, 608, 6, 32, id="6 bits"),
    ],
)
def test_norm_project_shapes(rows, columns, bits, group_size):
    generator = rng(rows + columns)
    weight, _ = quantized(generator, (rows, columns), bits, group_size)
    x, norm_weight = row(generator, columns, scale=3.0), gain(generator, columns)
    got = linear.norm_project(x, norm_weight, weight, EPS, mx.float32)
    want = reference.norm_project(to_numpy(x), to_numpy(norm_weight), weight, EPS)
    assert_close("out", got, want, FLOAT32_TOLERANCE)


def test_norm_project_rounds_the_norm_to_bfloat16():
    """The reference without that rounding is measurably further away."""
    generator = rng(5)
    weight, dense = quantized(generator, (64, 512), 4, 64)
    x, norm_weight = row(generator, 512), gain(generator, 512)
    got = to_numpy(linear.norm_project(x, norm_weight, weight, EPS, mx.float32))
    value = to_numpy(x)
    unrounded = value / np.sqrt(np.mean(value**2) + EPS) * to_numpy(norm_weight) @ dense.T
    rounded = reference.norm_project(value, to_numpy(norm_weight), weight, EPS)
    assert relative_error(got, rounded) < 1e-5 < 1e-4 < relative_error(got, unrounded)


def test_norm_project_bfloat16_is_the_rounded_float32():
    generator = rng(6)
    weight, _ = quantized(generator, (70, 192), 4, 32)
    x, norm_weight = row(generator, 192), gain(generator, 192)
    wide = linear.norm_project(x, norm_weight, weight, EPS, mx.float32)
    narrow = linear.norm_project(x, norm_weight, weight, EPS)
    np.testing.assert_array_equal(to_numpy(narrow), round_bf16(to_numpy(wide)))


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4], ids=["zero", "small", "large"])
def test_norm_project_scales_of_x(scale):
    generator = rng(7)
    weight, _ = quantized(generator, (12, 256), 4, 64)
    x, norm_weight = row(generator, 256, scale), gain(generator, 256)
    got = linear.norm_project(x, norm_weight, weight, EPS, mx.float32)
    want = reference.norm_project(to_numpy(x), to_numpy(norm_weight), weight, EPS)
    assert_close("out", got, want, FLOAT32_TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "head", "rows", "bits", "group_size"),
    [
        pytest.param(32, 128, 40, 4, 64, id="full size"),
        pytest.param(4, 128, 256, 4, 64, id="tiny"),
        pytest.param(64, 128, 9, 4, 64, id="most columns"),
        pytest.param(3, 64, 7, 8, 32, id="heads of 64"),
        pytest.param(5, 32, 33, 6, 32, id="heads of 32"),
        pytest.param(3, 256, 5, 5, 128, id="heads of 256"),
        pytest.param(4, 8, 3, 4, 32, id="heads of 8"),
    ],
)
def test_gated_norm_project_add(heads, head, rows, bits, group_size):
    generator = rng(heads * head + rows)
    columns, z_offset = heads * head, 24
    weight, _ = quantized(generator, (rows, columns), bits, group_size)
    y, residual, norm_weight = row(generator, columns, 0.1), row(generator, rows), gain(generator, head)
    projection = generator.standard_normal((1, z_offset + columns + 8)) * 2
    projection[:, :z_offset] = projection[:, z_offset + columns :] = np.nan  # only z is read
    proj = bf16(projection)
    got = linear.gated_norm_project_add(y, proj, z_offset, norm_weight, weight, residual, EPS)
    want = reference.gated_norm_project_add(
        to_numpy(y), to_numpy(proj), z_offset, to_numpy(norm_weight), weight, to_numpy(residual), EPS
    )
    assert_close("out", got, want, BFLOAT16_TOLERANCE / 4)


def test_project_add_rounds_once():
    """257 + 1 is 258 with one rounding; 257 rounds to 256 in bfloat16, and 256 + 1 again to 256."""
    codes = np.zeros((9, 32))
    codes[:, 0], codes[:, 31] = 255, 2
    got = linear.project_add(mx.ones((1, 32), mx.bfloat16), integer_weight(codes), mx.ones((1, 9), mx.bfloat16))
    assert to_numpy(got).tolist() == [[258.0] * 9]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_code_at_every_place_is_exact(bits):
    """Row n has code n % 2^bits at place n only, and x counts up, so a misplaced bit shows."""
    codes = np.zeros((32, 32), np.int64)
    codes[np.arange(32), np.arange(32)] = (np.arange(32) * 37 + 1) % 2**bits
    stream = ((codes[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(32, -1)
    words = np.packbits(stream, axis=-1, bitorder="little").view(np.uint32)
    ones, zeros = mx.ones((32, 1), mx.bfloat16), mx.zeros((32, 1), mx.bfloat16)
    weight = QuantizedWeight.pack(mx.array(words), ones, zeros, bits, 32)
    x = bf16(np.arange(1, 33)[None])
    got = linear.project_add(x, weight, mx.zeros((1, 32), mx.bfloat16))
    np.testing.assert_array_equal(to_numpy(got), round_bf16(np.diag(codes) * np.arange(1, 33))[None])


def test_wrong_arguments_are_refused():
    weight, _ = quantized(rng(8), (16, 256), 4, 64)
    stack, _ = quantized(rng(9), (2, 16, 256), 4, 64)
    wide, _ = quantized(rng(10), (2, 8320), 4, 64)
    x, norm_weight = mx.zeros((1, 256), mx.bfloat16), mx.ones((256,), mx.bfloat16)
    residual, head_gain = mx.zeros((1, 16), mx.bfloat16), mx.ones((128,), mx.bfloat16)
    proj = mx.zeros((1, 512), mx.bfloat16)
    gated = linear.gated_norm_project_add
    with pytest.raises(ValueError, match=r"x has shape \[2, 256\]; expected \[1, 256\]"):
        linear.norm_project(mx.zeros((2, 256), mx.bfloat16), norm_weight, weight, EPS)
    with pytest.raises(ValueError, match=r"x is mlx\.core\.float32"):
        linear.norm_project(x.astype(mx.float32), norm_weight, weight, EPS)
    with pytest.raises(ValueError, match="out_dtype"):
        linear.norm_project(x, norm_weight, weight, EPS, mx.float16)
    with pytest.raises(ValueError, match="stack of matrices"):
        linear.norm_project(x, norm_weight, stack, EPS)
    with pytest.raises(ValueError, match="at most 8192"):
        linear.norm_project(mx.zeros((1, 8320), mx.bfloat16), mx.ones((8320,), mx.bfloat16), wide, EPS)
    with pytest.raises(ValueError, match="residual has shape"):
        linear.project_add(x, weight, x)
    with pytest.raises(ValueError, match="z_offset is 4;"):
        gated(x, proj, 4, head_gain, weight, residual, EPS)
    with pytest.raises(ValueError, match="z_offset is 264;"):
        gated(x, proj, 264, head_gain, weight, residual, EPS)
    with pytest.raises(ValueError, match="norm_weight has 96 values"):
        gated(x, proj, 0, mx.ones((96,), mx.bfloat16), weight, residual, EPS)
