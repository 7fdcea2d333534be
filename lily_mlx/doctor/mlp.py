"""Checks of the gated MLP's kernels."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from lily_mlx.fallback import kernel
from lily_mlx.kernels.mlp import reference

from .check import Check, Output, close
from .inputs import Source, sample, take_rows, to_float64
from .sizes import EPS, Sizes

_OUTPUTS, _ROWS = 48, 12


def checks(sizes: Sizes) -> Iterator[Check]:
    """All checks of the family."""
    label = f"[{sizes.mlp_size}, {sizes.hidden}]"
    yield Check("mlp.gate_up_step", label, lambda: _step(sizes))
    for rows in sizes.rows:
        yield Check("mlp.gate_up_chunk", f"{rows} rows, {label}", lambda r=rows: _chunk(sizes, r))  # type: ignore[misc]


def _step(sizes: Sizes) -> list[Output]:
    source = Source("gate_up_step")
    gate, up = (source.weight(sizes.mlp_size, sizes.hidden) for _ in range(2))
    x, gain = source.normal(1, sizes.hidden), source.gain(sizes.hidden)
    got = kernel("mlp.gate_up_step")(x, gain, gate, up, EPS)
    columns = sample(sizes.mlp_size, _OUTPUTS)
    parts = (take_rows(gate, columns), take_rows(up, columns))
    return [
        close("hidden", got[:, mx.array(columns)], reference.gate_up_step(to_float64(x), to_float64(gain), *parts, EPS))
    ]


def _chunk(sizes: Sizes, rows: int) -> list[Output]:
    source = Source(f"gate_up_chunk {rows}")
    gate, up = (source.weight(sizes.mlp_size, sizes.hidden) for _ in range(2))
    x = source.normal(rows, sizes.hidden)
    got = kernel("mlp.gate_up_chunk")(x, gate, up)
    columns, taken = sample(sizes.mlp_size, _OUTPUTS), sample(rows, _ROWS)
    want = reference.gate_up_chunk(to_float64(x)[taken], take_rows(gate, columns), take_rows(up, columns))
    return [close("hidden", got[mx.array(taken)][:, mx.array(columns)], want)]
