"""`QuantizedWeight` and the reference's dequantisation against `mx.quantize`'s packing."""

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels.linear import QuantizedWeight, reference
from tests.support import quantized, rng


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_reference_dequantize_is_mlx_dequantize(bits, group_size):
    weight, dense = quantized(rng(bits * group_size), (5, 384), bits, group_size)
    np.testing.assert_allclose(reference.dequantize(weight), dense, rtol=1e-6, atol=1e-7)


def test_rows_and_columns_of_a_stack():
    weight, _ = quantized(rng(1), (3, 5, 128), 6, 64)
    assert (weight.rows, weight.columns) == (5, 128)


def test_round_bfloat16_is_mlx_rounding():
    values = rng(2).standard_normal(4096) * 10.0 ** rng(3).integers(-20, 20, 4096)
    want = np.array(mx.array(values.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32))
    np.testing.assert_array_equal(reference.round_bfloat16(values), want)


def weight_parts(rows=4, columns=64, bits=4, group_size=32):
    groups = columns // group_size
    return {
        "weight": mx.zeros((rows, columns * bits // 32), mx.uint32),
        "scales": mx.zeros((rows, groups), mx.bfloat16),
        "biases": mx.zeros((rows, groups), mx.bfloat16),
        "bits": bits,
        "group_size": group_size,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"bits": 7}, "7 bits", id="bits"),
        pytest.param({"group_size": 16}, "groups of 16", id="group"),
        pytest.param({"weight": mx.zeros((4, 8), mx.int32)}, "uint32", id="codes dtype"),
        pytest.param({"scales": mx.zeros((4, 2))}, "scales must be bfloat16", id="scales dtype"),
        pytest.param({"biases": mx.zeros((4, 3), mx.bfloat16)}, "need scales and biases", id="biases shape"),
        pytest.param({"weight": mx.zeros((4, 7), mx.uint32)}, "whole groups", id="part of a group"),
        pytest.param({"weight": mx.zeros((8,), mx.uint32)}, "whole groups", id="vector"),
    ],
)
def test_wrong_weight_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        QuantizedWeight(**{**weight_parts(), **change})
