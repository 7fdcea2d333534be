"""The chunk kernels of the linear family against their reference."""

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import linear
from lily_mlx.kernels.linear import policy, reference
from tests.kernels.linear.weights import integer_weight
from tests.support import (
    BFLOAT16_TOLERANCE,
    assert_close,
    bf16,
    quantized,
    rng,
    round_bf16,
    to_numpy,
)

EPS = 1e-6
# The product rounds its weights to bfloat16: an error of 2^-9 of each, averaged over K.
PRODUCT_TOLERANCE = 5e-3


def check_matmul(rows, outputs, columns, bits, group_size, residual=True, out_dtype=mx.bfloat16):
    generator = rng(rows * 31 + outputs * 7 + columns + bits)
    weight, _ = quantized(generator, (outputs, columns), bits, group_size)
    x = bf16(generator.standard_normal((rows, columns)))
    added = bf16(generator.standard_normal((rows, outputs))) if residual else None
    got = linear.matmul(x, weight, added, out_dtype)
    assert got.dtype == out_dtype
    want = reference.matmul(to_numpy(x), weight, None if added is None else to_numpy(added))
    assert_close("out", got, want, PRODUCT_TOLERANCE)


@pytest.mark.parametrize("rows", [1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 65, 129])
def test_matmul_row_counts(rows):
    """Both sides of every boundary between the tile heights 16, 32 and 64."""
    check_matmul(rows, 70, 128, 4, 64)


@pytest.mark.parametrize("outputs", [1, 3, 4, 5, 7, 8, 9, 33, 63, 64, 65, 130])
def test_matmul_output_counts(outputs):
    check_matmul(6, outputs, 64, 4, 32)


@pytest.mark.parametrize("columns", [32, 64, 96, 192, 320, 544, 608, 2080])
def test_matmul_any_multiple_of_32_columns(columns):
    for rows in (1, 2, 6, 16):
        check_matmul(rows, 33, columns, 4, 32)


@pytest.mark.parametrize("columns", [96, 320])
def test_matmul_any_multiple_of_32_columns_in_taller_tiles(columns):
    for rows in (33, 17):
        check_matmul(rows, 33, columns, 4, 32)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_matmul_formats(bits, group_size):
    check_matmul(17, 33, 256, bits, group_size)


@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "bits", "residual", "out_dtype"),
    [
        pytest.param(5, 257, 2048, 8, False, mx.float32, id="full-size router"),
        pytest.param(9, 17, 256, 8, False, mx.float32, id="tiny router"),
        pytest.param(17, 70, 2048, 4, False, mx.bfloat16, id="full-size projection"),
        pytest.param(20, 256, 512, 4, True, mx.bfloat16, id="tiny output projection"),
    ],
)
def test_matmul_model_shapes(rows, outputs, columns, bits, residual, out_dtype):
    check_matmul(rows, outputs, columns, bits, 64, residual, out_dtype)


def test_matmul_rounds_once():
    """257 + 1 is 258 with one rounding; 257 rounds to 256 in bfloat16, and 256 + 1 again to 256."""
    codes = np.zeros((9, 32))
    codes[:, 0], codes[:, 31] = 255, 2
    got = linear.matmul(mx.ones((3, 32), mx.bfloat16), integer_weight(codes), mx.ones((3, 9), mx.bfloat16))
    assert to_numpy(got).tolist() == [[258.0] * 9] * 3


def test_matmul_rounds_the_weights_and_nothing_else():
    """Against the product with rounded weights the float32 output is exact to float32 accuracy."""
    generator = rng(11)
    weight, dense = quantized(generator, (40, 256), 4, 64)
    x = bf16(generator.standard_normal((18, 256)))
    got = linear.matmul(x, weight, None, mx.float32)
    assert_close("out", got, to_numpy(x) @ round_bf16(dense).T, 1e-5)


def test_matmul_row_does_not_depend_on_the_chunk():
    """A row's result is the same alone, in a short chunk and in a long one."""
    generator = rng(12)
    weight, _ = quantized(generator, (33, 64), 4, 32)
    x = bf16(generator.standard_normal((70, 64)))
    whole = to_numpy(linear.matmul(x, weight, None, mx.float32))
    for rows in (1, 17, 33):
        got = linear.matmul(x[:rows], weight, None, mx.float32)
        assert_close(f"{rows} rows", got, whole[:rows], 1e-6)


@pytest.mark.parametrize("columns", [8, 32, 256, 264, 2048])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 17])
def test_rms_norm(rows, columns):
    generator = rng(rows + columns)
    x, weight = (
        bf16(generator.standard_normal((rows, columns)) * 2),
        bf16(generator.uniform(0.5, 1.5, columns)),
    )
    got = linear.rms_norm(x, weight, EPS)
    want = reference.rms_norm(to_numpy(x), to_numpy(weight), EPS)
    assert_close("out", got, want, 4e-3)
    # One rounding: nearly every value is the rounded float64 value itself.
    assert np.mean(to_numpy(got) == want) > 0.995


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_embed(bits, group_size):
    generator = rng(bits + group_size)
    table, _ = quantized(generator, (50, 384), bits, group_size)
    for tokens in ([49], [0, 7, 7, 49, 21], list(range(9))):
        ids = np.array(tokens, np.uint32)
        got = linear.embed(mx.array(ids), table)
        assert_close("out", got, reference.embed(ids, table), BFLOAT16_TOLERANCE / 4)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_embed_of_a_small_table(rows):
    table, _ = quantized(rng(15 + rows), (rows, 32), 3, 32)
    ids = np.array([rows - 1, 0], np.uint32)
    assert_close("out", linear.embed(mx.array(ids), table), reference.embed(ids, table), BFLOAT16_TOLERANCE / 4)


def test_embed_id_beyond_the_table_reads_its_last_row():
    table, _ = quantized(rng(13), (50, 64), 4, 64)
    got = linear.embed(mx.array([50, 2**32 - 1], mx.uint32), table)
    want = linear.embed(mx.array([49, 49], mx.uint32), table)
    np.testing.assert_array_equal(to_numpy(got), to_numpy(want))


def test_wrong_arguments_are_refused():
    weight, _ = quantized(rng(14), (16, 256), 4, 64)
    x = mx.zeros((4, 256), mx.bfloat16)
    with pytest.raises(ValueError, match=r"x has shape \[4, 128\]; expected \[any, 256\]"):
        linear.matmul(x[:, :128], weight)
    with pytest.raises(ValueError, match=r"x has shape \[0, 256\]"):
        linear.matmul(x[:0], weight)
    with pytest.raises(ValueError, match="residual has shape"):
        linear.matmul(x, weight, x)
    with pytest.raises(ValueError, match="weight has shape"):
        linear.rms_norm(x, mx.ones((128,), mx.bfloat16), EPS)
    with pytest.raises(ValueError, match="multiple of 8"):
        linear.rms_norm(x[:, :12], mx.ones((12,), mx.bfloat16), EPS)
    with pytest.raises(ValueError, match=r"tokens is mlx\.core\.int32"):
        linear.embed(mx.array([1, 2]), weight)


def test_plans_cover_every_shape():
    for columns in range(32, 8193, 32):
        for rows in (1, 257, 1000, 100_000):
            plan = policy.matvec_plan(rows, columns)
            assert plan.lanes in (1, 2, 4, 8, 16, 32)
            assert plan.lanes * 32 >= min(columns, 1024)
            assert plan.block * plan.blocks(rows) >= rows
            assert -(-columns // 32 // plan.lanes) % plan.ahead == 0


@pytest.mark.parametrize("device", sorted(policy.DEVICES))
def test_matmul_plans(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy, "device_policy", lambda: policy.DEVICES[device])
    for rows in (1, 8, 16, 17, 32, 33, 64, 65, 127, 512, 4096):
        for columns in (8, 257, 2048, 12352):
            for depth in (32, 64, 96, 512, 2048, 4096):
                plan = policy.tile_plan(rows, columns, depth)
                across, down = plan.threadgroups(rows, columns)
                assert across * plan.columns >= columns
                assert down * plan.rows >= rows
                assert plan.rows < 2 * max(rows, 16)
                assert depth % plan.depth == 0
                m, n, k = plan.across
                assert plan.rows % (8 * m) == plan.columns % (8 * n) == plan.depth % (8 * k) == 0
                assert plan.threads <= 512
