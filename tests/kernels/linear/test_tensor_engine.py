"""The matrix product with tensor operations, against the reference and against the other engine."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import linear
from lily_mlx.kernels.linear import policy, prefill
from lily_mlx.metal import use_matrix_engine
from tests.support import bf16, need_tensor_operations, quantized, rng, to_numpy

from .test_prefill import check_matmul
from .weights import integer_weight


@pytest.fixture(autouse=True)
def tensors() -> Iterator[None]:
    need_tensor_operations()
    with use_matrix_engine("tensor"):
        yield


@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "bits", "residual", "out_dtype"),
    [
        pytest.param(9, 33, 96, 4, False, mx.bfloat16, id="16 rows, 32 of K"),
        pytest.param(17, 65, 160, 8, True, mx.bfloat16, id="32 rows, residual"),
        pytest.param(33, 130, 320, 3, False, mx.float32, id="64 rows, float32"),
        pytest.param(70, 63, 64, 4, True, mx.float32, id="two blocks of rows, both"),
    ],
)
def test_product(rows, outputs, columns, bits, residual, out_dtype):
    check_matmul(rows, outputs, columns, bits, 32, residual, out_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [32, 64, 96, 192, 544, 2080])
@pytest.mark.parametrize("rows", [9, 16, 17, 31, 32, 33, 64, 65, 129])
def test_many_products(rows, columns):
    check_matmul(rows, 70, columns, 4, 32)


def test_integers_are_exact_and_equal_with_both_engines():
    """Sums of small integers have no rounding, whatever their order."""
    generator = rng(3)
    codes = generator.integers(0, 256, (70, 96))
    weight, x = integer_weight(codes), bf16(generator.integers(-3, 4, (40, 96)))
    got = linear.matmul(x, weight, None, mx.float32)
    with use_matrix_engine("simdgroup"):
        assert mx.array_equal(got, linear.matmul(x, weight, None, mx.float32))
    np.testing.assert_array_equal(to_numpy(got), to_numpy(x) @ codes.T)


def test_the_kernel_is_that_of_the_engine(monkeypatch):
    launched = []
    for name, kernel in prefill._TILED.items():
        monkeypatch.setitem(
            prefill._TILED, name, lambda *_, k=kernel, **options: launched.append(k) or k(*_, **options)
        )
    weight, _ = quantized(rng(4), (70, 64), 4, 32)
    x = mx.zeros((20, 64), mx.bfloat16)
    linear.matmul(x, weight)
    with use_matrix_engine("simdgroup"):
        linear.matmul(x, weight)
    assert [kernel.name for kernel in launched] == ["tensor_matmul", "matmul"]


@pytest.mark.parametrize("device", sorted(policy.DEVICES))
def test_plans(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy, "device_policy", lambda: policy.DEVICES[device])
    for rows in (1, 8, 16, 17, 32, 33, 64, 65, 4096):
        for columns in (8, 257, 12352):
            for depth in (32, 64, 96, 512, 4096):
                plan = policy.tile_plan(rows, columns, depth)
                m, n, k = plan.across
                assert k == 1, "the engine takes no slices of K"
                assert plan.rows // m % 16 == plan.columns // n % 32 == 0
                assert depth % plan.depth == plan.depth % 16 == 0
                assert plan.rows < 2 * max(rows, 16)
                assert plan.threads <= 128
