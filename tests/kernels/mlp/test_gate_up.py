"""The gated MLP's kernels against their reference."""

from __future__ import annotations

import mlx.core as mx
import pytest

from lily_mlx.kernels import mlp
from lily_mlx.kernels.mlp import reference
from tests.support import BFLOAT16_TOLERANCE, assert_close, bf16, quantized, rng, round_bf16, to_numpy

EPS = 1e-6
# intermediate, hidden, bits, group size
SIZES = [
    pytest.param(1, 32, 4, 32, id="smallest"),
    pytest.param(65, 64, 2, 64, id="2 bits"),
    pytest.param(33, 96, 3, 32, id="3 bits"),
    pytest.param(130, 192, 5, 64, id="5 bits"),
    pytest.param(70, 320, 6, 64, id="6 bits"),
    pytest.param(100, 256, 8, 128, id="8 bits"),
    pytest.param(200, 1024, 4, 64, id="width of 0.8B"),
    pytest.param(36, 5120, 4, 64, id="width of 27B"),
    pytest.param(7, 8192, 4, 128, id="most columns"),
    pytest.param(66, 160, 16, 0, id="bfloat16"),
    pytest.param(40, 2048, 16, 0, id="bfloat16, wide"),
]


def pair(generator, intermediate, hidden, bits, group_size):
    return [quantized(generator, (intermediate, hidden), bits, group_size)[0] for _ in range(2)]


@pytest.mark.parametrize(("intermediate", "hidden", "bits", "group_size"), SIZES)
def test_step_is_the_definition(intermediate, hidden, bits, group_size):
    generator = rng(intermediate + hidden)
    gate, up = pair(generator, intermediate, hidden, bits, group_size)
    x, gain = bf16(3 * generator.standard_normal((1, hidden))), bf16(generator.uniform(0.5, 1.5, hidden))
    got = mlp.gate_up_step(x, gain, gate, up, EPS)
    assert got.dtype == mx.bfloat16
    want = reference.gate_up_step(to_numpy(x), to_numpy(gain), gate, up, EPS)
    assert_close("hidden", got, want, BFLOAT16_TOLERANCE / 2)


@pytest.mark.parametrize("rows", [1, 3, 9, 17, 70])
@pytest.mark.parametrize(("intermediate", "hidden", "bits", "group_size"), SIZES[:8] + SIZES[9:])
def test_chunk_is_the_definition(intermediate, hidden, bits, group_size, rows):
    if rows > 9 and hidden > 512:
        hidden = 512  # the same choices of the policy, in less time
    generator = rng(intermediate + hidden + rows)
    gate, up = pair(generator, intermediate, hidden, bits, group_size)
    x = bf16(generator.standard_normal((rows, hidden)))
    got = mlp.gate_up_chunk(x, gate, up)
    assert got.dtype == mx.bfloat16
    assert_close("hidden", got, reference.gate_up_chunk(to_numpy(x), gate, up), BFLOAT16_TOLERANCE)


def test_step_and_chunk_agree():
    generator = rng(5)
    gate, up = pair(generator, 96, 256, 4, 64)
    x, gain = bf16(generator.standard_normal((1, 256))), mx.ones(256, mx.bfloat16)
    normed = bf16(round_bf16(to_numpy(x) / (to_numpy(x) ** 2).mean() ** 0.5))
    step, chunk = mlp.gate_up_step(x, gain, gate, up, EPS), mlp.gate_up_chunk(normed, gate, up)
    assert_close("hidden", step, to_numpy(chunk), BFLOAT16_TOLERANCE)


@pytest.mark.parametrize("change", ["rows", "bits"])
def test_matrices_that_differ_are_an_error(change):
    generator = rng(1)
    gate, _ = quantized(generator, (32, 64), 4, 64)
    up, _ = quantized(generator, (33 if change == "rows" else 32, 64), 8 if change == "bits" else 4, 64)
    with pytest.raises(ValueError, match="read together"):
        mlp.gate_up_step(bf16(generator.standard_normal((1, 64))), mx.ones(64, mx.bfloat16), gate, up, EPS)
    with pytest.raises(ValueError, match="read together"):
        mlp.gate_up_chunk(bf16(generator.standard_normal((3, 64))), gate, up)


def test_a_row_of_another_width_is_an_error():
    generator = rng(2)
    gate, up = pair(generator, 32, 64, 4, 64)
    with pytest.raises(ValueError, match=r"x has shape \[1, 32\]; expected \[1, 64\]"):
        mlp.gate_up_step(bf16(generator.standard_normal((1, 32))), mx.ones(64, mx.bfloat16), gate, up, EPS)
    with pytest.raises(ValueError, match=r"x has shape \[2, 96\]"):
        mlp.gate_up_chunk(bf16(generator.standard_normal((2, 96))), gate, up)
