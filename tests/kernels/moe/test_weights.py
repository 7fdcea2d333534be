"""Checks of the experts' weights, and 64-bit offsets into them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import mlx.core as mx
import pytest

import lily_mlx
from lily_mlx.metal import Kernel
from tests.support import quantized, rng, to_numpy

from .experts import Format, make_experts

PACKAGE = Path(lily_mlx.__file__).parent


def test_sizes() -> None:
    weights, _ = make_experts(rng(0), 5, 96, 160, Format((4, 32), (4, 32), (4, 32), (4, 32)))
    assert (weights.experts, weights.intermediate, weights.hidden) == (5, 96, 160)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("up", (4, 64, 128), "up holds matrices \\[4, 64, 128\\], expected \\[4, 128, 64\\]"),
        ("down", (4, 128, 64), "down holds matrices"),
        ("down", (3, 64, 128), "down holds matrices \\[3, 64, 128\\], expected \\[4, 64, 128\\]"),
        ("shared_gate", (4, 128, 64), "shared_gate holds matrices"),
        ("shared_up", (64, 64), "shared_up holds matrices"),
        ("shared_down", (64, 64), "shared_down holds matrices"),
        ("gate", (128, 64), "gate has shape"),
    ],
)
def test_shapes_that_do_not_fit(name: str, shape: tuple[int, ...], message: str) -> None:
    weights, _ = make_experts(rng(1), 4, 128, 64)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(weights, **{name: quantized(rng(2), shape)[0]})


@pytest.mark.parametrize(("name", "shape"), [("up", (4, 128, 64)), ("shared_up", (128, 64))])
def test_formats_of_gate_and_up_must_be_equal(name: str, shape: tuple[int, ...]) -> None:
    weights, _ = make_experts(rng(3), 4, 128, 64)
    with pytest.raises(ValueError, match="re-encode one of them"):
        dataclasses.replace(weights, **{name: quantized(rng(4), shape, bits=8)[0]})


@pytest.mark.parametrize(("rows", "columns", "bits", "group"), [(2048, 4096, 8, 32), (512, 2048, 4, 64)])
@pytest.mark.parametrize("expert", [0, 1, 255, 256, 511])
def test_offsets_are_64_bit(expert: int, rows: int, columns: int, bits: int, group: int) -> None:
    """512 experts of [2 * 1024, 4096] hold 2^32 weights: byte offsets from the kernels' own helpers."""
    headers = ("metal/include/quantized.h", "kernels/moe/experts.h")
    kernel = Kernel.from_source(
        f"offsets_{rows}",
        ["expert"],
        ["offsets"],
        "if (thread_position_in_grid.x == 0) {"
        "  const size_t words = expert_words<ROWS, K, BITS>(expert[0]) * 4u;"
        "  const size_t groups = expert_groups<ROWS, K, GROUP>(expert[0]) * 2u;"
        "  offsets[0] = uint(words & 0xffffffffu);"
        "  offsets[1] = uint(words >> 32);"
        "  offsets[2] = uint(groups & 0xffffffffu);"
        "  offsets[3] = uint(groups >> 32);"
        "}",
        "\n".join((PACKAGE / header).read_text() for header in headers),
    )
    (offsets,) = kernel(
        [mx.array([expert], dtype=mx.uint32)],
        template={"ROWS": rows, "K": columns, "BITS": bits, "GROUP": group},
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(4,)],
        output_dtypes=[mx.uint32],
    )
    low_words, high_words, low_groups, high_groups = (int(value) for value in to_numpy(offsets))
    assert low_words + (high_words << 32) == expert * rows * columns * bits // 8
    assert low_groups + (high_groups << 32) == expert * rows * (columns // group) * 2
