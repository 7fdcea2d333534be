"""`QuantizedWeight` and the reference's dequantisation against `mx.quantize`'s packing."""

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels.linear import QuantizedWeight, reference
from lily_mlx.kernels.linear.checks import SMALLEST_BUFFER
from lily_mlx.kernels.linear.weight import BITS, GROUP_SIZES, sections_of
from lily_mlx.metal import Kernel
from tests.support import bf16, quantized, rng

# What the helpers of quantized.h say: bytes before the scales and before the biases, as two words each.
OFFSETS = """
const size_t count = size_t(rows[0]) << rows[1];
const device uchar* start = (const device uchar*)weight;
const size_t scales = size_t((const device uchar*)scales_of<BITS, GROUP, K>(weight, count) - start);
const size_t biases = size_t((const device uchar*)biases_of<BITS, GROUP, K>(weight, count) - start);
if (thread_position_in_grid.x == 0u) {
  out[0] = uint(scales);
  out[1] = uint(scales >> 32);
  out[2] = uint(biases);
  out[3] = uint(biases >> 32);
}
"""


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
        QuantizedWeight.pack(**{**weight_parts(), **change})


def test_wrong_packed_array_is_refused():
    weight, _ = quantized(rng(4), (3, 64), 4, 32)
    for packed in (weight.packed[:-1], weight.packed.reshape(1, -1), weight.packed.view(mx.int32)):
        with pytest.raises(ValueError, match=r"is uint32 \[\d+\], got .*; make it with QuantizedWeight.pack"):
            QuantizedWeight(packed, weight.shape, 4, 32)
    with pytest.raises(ValueError, match="whole groups of 64"):
        QuantizedWeight(weight.packed, (3, 32), 4, 64)
    with pytest.raises(ValueError, match="7 bits"):
        QuantizedWeight(weight.packed, weight.shape, 7, 32)


def random_parts(shape, bits, group_size):
    """Codes, scales and biases in which no two elements are likely to be equal."""
    *lead, columns = shape
    generator = rng(bits * group_size + columns)
    words = generator.integers(0, 2**32, (*lead, columns * bits // 32), dtype=np.uint32)
    scales, biases = (bf16(generator.standard_normal((*lead, columns // group_size))) for _ in range(2))
    return mx.array(words), scales, biases


@pytest.mark.parametrize("shape", [(1, 128), (3, 128), (7, 384), (257, 128), (3, 5, 128), (2, 1, 384)], ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_the_parts_of_a_packed_weight_are_what_was_packed(bits, group_size, shape):
    parts = random_parts(shape, bits, group_size)
    weight = QuantizedWeight.pack(*parts, bits, group_size)
    assert (weight.shape, weight.lead) == (shape, shape[:-2])
    for name, part in zip(("weight", "scales", "biases"), parts, strict=True):
        view = getattr(weight, name)
        assert (view.shape, view.dtype) == (part.shape, part.dtype)
        assert mx.array_equal(view, part), name
        assert getattr(weight, name) is view


def test_the_parts_take_no_memory_of_their_own():
    weight = QuantizedWeight.pack(*random_parts((512, 2048), 4, 64), 4, 64)
    mx.eval(weight.packed)
    mx.synchronize()  # what packing needed may be freed later still
    before = mx.get_active_memory()
    mx.eval(weight.weight, weight.scales, weight.biases)
    assert mx.get_active_memory() <= before


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_the_smallest_weight_is_no_constant_buffer(bits, group_size):
    assert sections_of(1, group_size, bits, group_size).size >= SMALLEST_BUFFER


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_kernels_find_the_sections_where_they_are(bits, group_size, tmp_path):
    """Odd numbers of rows, and stacks whose sections start beyond 2^32 bytes."""
    body = tmp_path / "offsets.metal"
    body.write_text(OFFSETS)
    kernel = Kernel("offsets", ("weight", "rows"), ("out",), str(body), ("metal/include/quantized.h",))
    columns = 3 * 128
    for rows, shift in [(1, 0), (2, 0), (3, 0), (5, 0), (7, 0), (257, 0), (1023, 0), (12353, 0), (3, 26), (2**31, 0)]:
        sections = sections_of(rows << shift, columns, bits, group_size)
        (out,) = kernel(
            [mx.zeros(8, mx.uint32), mx.array([rows, shift], mx.uint32)],
            template={"BITS": bits, "GROUP": group_size, "K": columns},
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(4,)],
            output_dtypes=[mx.uint32],
        )
        low_scales, high_scales, low_biases, high_biases = (int(word) for word in np.array(out))
        assert (high_scales << 32) + low_scales == 4 * sections.scales, rows
        assert (high_biases << 32) + low_biases == 4 * sections.biases, rows
        assert sections.scales % 4 == sections.biases % 4 == sections.size % 4 == 0
        assert sections.codes <= sections.scales < sections.codes + 4
        length = sections.biases - sections.scales
        assert sections.groups <= 2 * length < sections.groups + 8
        assert sections.size == sections.biases + length
