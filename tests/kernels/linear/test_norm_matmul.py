"""A norm and its product in one launch, against the reference and the two kernels that it stands for."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import linear
from lily_mlx.kernels.linear import policy, reference
from lily_mlx.kernels.linear.policy import NORM_MATMUL_COLUMNS, NORM_MATMUL_ROWS, ShortPlan
from lily_mlx.metal import Kernel
from tests.support import assert_close, bf16, quantized, rng, round_bf16, to_numpy

EPS = 1e-6
ONE, TWO = ["short_norm_matmul"], ["rms_norm", "matmul"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that the test has launched so far."""
    names: list[str] = []
    call = Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", lambda self, *a, **k: names.append(self.name) or call(self, *a, **k))
    return names


def check(rows, outputs, columns, bits=8, group_size=32, out_dtype=mx.float32):
    generator = rng(rows * 31 + outputs * 7 + columns + bits)
    weight, dense = quantized(generator, (outputs, columns), bits, group_size)
    # Rows of different lengths, so that one row's length is not another's.
    x = bf16(generator.standard_normal((rows, columns)) * generator.uniform(0.1, 30.0, (rows, 1)))
    gain = bf16(generator.uniform(0.5, 1.5, columns))
    out, normed = linear.norm_matmul(x, gain, weight, EPS, out_dtype)
    assert (out.dtype, normed.dtype) == (out_dtype, mx.bfloat16)
    np.testing.assert_array_equal(to_numpy(normed), to_numpy(linear.rms_norm(x, gain, EPS)))
    # Against the definition: the weights are rounded to bfloat16, and a normed value may round to its other neighbour.
    want = reference.norm_matmul(to_numpy(x), to_numpy(gain), weight, EPS)
    assert_close("out", out, want[0], 5e-3)
    # Against the product of what was written the sums are exact to float32 accuracy.
    if out_dtype == mx.float32:
        assert_close("product", out, to_numpy(normed) @ round_bf16(dense).T, 1e-5)
    return out, normed


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65])
def test_row_counts(rows: int) -> None:
    """Both sides of each block of rows and of the route's boundary."""
    check(rows, 33, 96)


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 130])
def test_output_counts(outputs: int) -> None:
    """Tiles of which some have no columns of the norm to write: 64 columns are 8 pieces."""
    check(3, outputs, 64, 4)


@pytest.mark.parametrize("columns", [32, 96, 224, 320, 608, 1280, 2080, 2304])
def test_any_multiple_of_32_columns(columns: int) -> None:
    """One stage and several, columns that end inside one, and every way in which simdgroups share a row's norm."""
    check(9, 33, columns)


@pytest.mark.parametrize(
    ("bits", "group_size"), [(2, 32), (3, 64), (4, 64), (5, 32), (6, 128), (8, 64), (16, 0)], ids=str
)
def test_formats(bits: int, group_size: int) -> None:
    check(5, 33, 256, bits, group_size)


@pytest.mark.parametrize("rows", [2, 17])
def test_full_size_router(rows: int) -> None:
    check(rows, 257, 2048, 8, 64)


def test_bfloat16_output() -> None:
    check(5, 17, 128, out_dtype=mx.bfloat16)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(ShortPlan(8, 1, 1, 8, 1024, ahead=2, x_ahead=True), id="8 rows, x ahead"),
        pytest.param(ShortPlan(8, 1, 2, 4, 1024, ahead=4), id="8 rows, two stages ahead"),
        pytest.param(ShortPlan(8, 2, 1, 2, 512, ahead=1), id="8 rows, two bands"),
        pytest.param(ShortPlan(16, 1, 2, 4, 512, ahead=3, x_ahead=True), id="16 rows, three stages ahead"),
        pytest.param(ShortPlan(32, 1, 2, 2, 256, ahead=2), id="32 rows"),
        pytest.param(ShortPlan(64, 1, 4, 1, 128, ahead=1, x_ahead=True), id="64 rows"),
    ],
)
@pytest.mark.parametrize(("rows", "columns"), [(13, 1184), pytest.param(64, 512, marks=pytest.mark.slow)])
def test_plans(plan: ShortPlan, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to share the work out: rows that fill no block, stages and columns that end inside one."""
    device = policy.device_policy()
    monkeypatch.setattr(policy, "device_policy", lambda: replace(device, short_norm=plan))
    check(rows, 35, columns)


@pytest.mark.parametrize(
    ("rows", "outputs", "kernels"),
    [
        pytest.param(NORM_MATMUL_ROWS, 8, ONE, id="most rows"),
        pytest.param(NORM_MATMUL_ROWS + 1, 8, TWO, id="more rows"),
        pytest.param(20, NORM_MATMUL_COLUMNS, ONE, id="most columns"),
        pytest.param(20, NORM_MATMUL_COLUMNS + 1, TWO, id="more columns"),
    ],
)
def test_both_sides_of_one_launch(rows: int, outputs: int, kernels: list[str], launched: list[str]) -> None:
    x, gain = bf16(rng(rows).standard_normal((rows, 32))), mx.ones((32,), mx.bfloat16)
    weight, _ = quantized(rng(outputs), (outputs, 32), 8, 32)
    out, normed = linear.norm_matmul(x, gain, weight, EPS, mx.float32)
    assert launched == kernels
    two = linear.matmul(normed, weight, None, mx.float32)
    assert_close("out", out, to_numpy(two), 1e-6)


def test_a_row_does_not_depend_on_the_others() -> None:
    """A sequence of a batch has the same numbers, to the bit, whatever else the step computes."""
    generator = rng(12)
    weight, _ = quantized(generator, (33, 320), 8, 64)
    x, gain = bf16(generator.standard_normal((64, 320))), bf16(generator.uniform(0.5, 1.5, 320))
    whole, normed = linear.norm_matmul(x, gain, weight, EPS, mx.float32)
    for rows in (slice(0, 1), slice(5, 14), slice(31, 64)):
        part, part_normed = linear.norm_matmul(mx.contiguous(x[rows]), gain, weight, EPS, mx.float32)
        assert mx.array_equal(part, whole[rows])
        assert mx.array_equal(part_normed, normed[rows])


def test_rows_of_zeros_and_of_one_large_value() -> None:
    x = np.zeros((3, 64))
    x[1, 5], x[2] = 1e18, 1e-20
    weight, dense = quantized(rng(1), (16, 64), 8, 32)
    out, normed = linear.norm_matmul(bf16(x), mx.ones((64,), mx.bfloat16), weight, EPS, mx.float32)
    want = reference.rms_norm(round_bf16(x), np.ones(64), EPS)
    assert_close("normed", normed, want, 4e-3)
    assert not to_numpy(out)[0].any()
    assert_close("out", out[1:2], 8 * round_bf16(dense)[:, 5][None], 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"x": mx.zeros((4, 128), mx.bfloat16)}, r"x has shape \[4, 128\]; expected \[any, 256\]", id="x"),
        pytest.param({"x": mx.zeros((0, 256), mx.bfloat16)}, r"x has shape \[0, 256\]", id="no rows"),
        pytest.param({"x": mx.zeros((4, 256))}, "x is .*float32; expected .*bfloat16", id="float32 x"),
        pytest.param({"norm_weight": mx.ones((128,), mx.bfloat16)}, r"norm_weight has shape \[128\]", id="norm weight"),
        pytest.param({"out_dtype": mx.float16}, "out_dtype is .*float16", id="dtype"),
        pytest.param({"w": quantized(np.random.default_rng(0), (2, 8, 256))[0]}, "stack of matrices", id="stack"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, message: str, launched: list[str]) -> None:
    weight, _ = quantized(rng(14), (16, 256), 4, 64)
    arguments = {"x": mx.zeros((4, 256), mx.bfloat16), "norm_weight": mx.ones((256,), mx.bfloat16), "w": weight}
    with pytest.raises(ValueError, match=message):
        linear.norm_matmul(**(arguments | change), eps=EPS)
    assert not launched


@pytest.mark.parametrize("device", sorted(policy.DEVICES))
def test_plans_have_few_rows_for_any_number(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan does not depend on the rows, and so the sums do not."""
    monkeypatch.setattr(policy, "device_policy", lambda: policy.DEVICES[device])
    for depth in (32, 256, 2048, 4096):
        plans = {policy.norm_matmul_plan(rows, 257, depth) for rows in (1, 2, 8, 9, 33, NORM_MATMUL_ROWS)}
        assert plans == {policy.DEVICES[device].short_norm.for_depth(depth)}
    assert policy.norm_matmul_plan(NORM_MATMUL_ROWS + 1, 257, 2048) is None
    assert policy.norm_matmul_plan(1, NORM_MATMUL_COLUMNS + 1, 2048) is None
