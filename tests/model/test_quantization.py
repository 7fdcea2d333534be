"""Joining and re-encoding quantised weights changes no value."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.model.quantization import join_rows, pack_codes, reencode, unpack_codes
from tests.support import quantized, rng, to_numpy

BITS = (2, 3, 4, 5, 6, 8)


def dense(weight: QuantizedWeight) -> np.ndarray:
    scales, biases = weight.scales.astype(mx.float32), weight.biases.astype(mx.float32)
    return to_numpy(mx.dequantize(weight.weight, scales, biases, group_size=weight.group_size, bits=weight.bits))


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_mlx_codes(bits):
    weight, _ = quantized(rng(bits), (3, 96), bits, 32)
    codes = unpack_codes(weight.weight, bits)
    one, zero = mx.ones((3, 3)), mx.zeros((3, 3))
    want = mx.dequantize(weight.weight, one, zero, group_size=32, bits=bits)
    assert np.array_equal(to_numpy(codes), to_numpy(want))
    assert mx.array_equal(pack_codes(codes, bits), weight.weight)


@pytest.mark.parametrize(("narrow", "wide"), list(itertools.combinations(BITS, 2)))
def test_wider_bits_are_exact(narrow, wide):
    weight, want = quantized(rng(narrow), (5, 128), narrow, 64)
    assert np.array_equal(dense(reencode(weight, wide, 64)), want)


@pytest.mark.parametrize(("large", "small"), [(64, 32), (128, 32), (128, 64)])
def test_smaller_groups_are_exact(large, small):
    weight, want = quantized(rng(large), (2, 3, 256), 4, large)
    assert np.array_equal(dense(reencode(weight, 4, small)), want)


def test_joins_unlike_parts():
    generator = rng(7)
    parts = [quantized(generator, (5, 256), 4, 64), quantized(generator, (1, 256), 8, 128)]
    joined = join_rows([weight for weight, _ in parts])
    assert (joined.bits, joined.group_size, joined.rows) == (8, 64, 6)
    assert np.array_equal(dense(joined), np.concatenate([values for _, values in parts]))


@pytest.mark.parametrize(("bits", "group_size"), [(3, 64), (4, 128)], ids=["fewer-bits", "larger-groups"])
def test_refuses_a_lossy_encoding(bits, group_size):
    weight, _ = quantized(rng(0), (1, 128), 4, 64)
    with pytest.raises(ValueError, match="without loss"):
        reencode(weight, bits, group_size)
