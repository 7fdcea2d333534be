"""The gated MLP's chunk with tensor operations, against the reference."""

from __future__ import annotations

import mlx.core as mx
import pytest

from lily_mlx.kernels import mlp
from lily_mlx.kernels.mlp import prefill, reference
from lily_mlx.metal import use_matrix_engine
from tests.support import BFLOAT16_TOLERANCE, assert_close, bf16, need_tensor_operations, quantized, rng, to_numpy


@pytest.mark.parametrize(
    ("rows", "intermediate", "hidden", "bits"), [(9, 33, 96, 3), (17, 65, 64, 4), (70, 70, 320, 6)], ids=str
)
def test_chunk_is_the_definition(rows, intermediate, hidden, bits, monkeypatch):
    need_tensor_operations()
    launched = []
    kernel = prefill._TILED["tensor"]
    monkeypatch.setitem(
        prefill._TILED, "tensor", lambda *inputs, **options: launched.append(kernel.name) or kernel(*inputs, **options)
    )
    generator = rng(rows + intermediate)
    gate, up = (quantized(generator, (intermediate, hidden), bits, 32)[0] for _ in range(2))
    x = bf16(generator.standard_normal((rows, hidden)))
    with use_matrix_engine("tensor"):
        got = mlp.gate_up_chunk(x, gate, up)
    assert got.dtype == mx.bfloat16
    assert launched == ["mlp_tensor_gate_up_chunk"]
    assert_close("hidden", got, reference.gate_up_chunk(to_numpy(x), gate, up), BFLOAT16_TOLERANCE)
