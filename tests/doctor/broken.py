"""Kernels broken on purpose, each in its own way."""

from __future__ import annotations

from typing import Any

import pytest

from lily_mlx.kernels.linear import decode
from lily_mlx.kernels.moe import prefill
from lily_mlx.metal import Kernel

WRONG, NO_COMPILE, RAISES = "wrong result", "does not compile", "raises"


def break_kernel(monkeypatch: pytest.MonkeyPatch, how: str) -> str:
    """Breaks one kernel; returns the function that it belongs to."""
    if how == WRONG:
        good = decode._PROJECT_ADD

        def doubled(*arguments: Any, **options: Any) -> Any:
            return [2 * out for out in good(*arguments, **options)]

        monkeypatch.setattr(decode, "_PROJECT_ADD", doubled)
        return "linear.project_add"
    if how == NO_COMPILE:
        good = prefill._COMBINE_NORM
        text = good.text.body_part.text.replace(";", ";;", 1) + "\nno_such_function(thread_position_in_grid.x);\n"
        header = "".join(part.text for part in good.text.header_parts)
        bad = Kernel.from_source(good.name, good.inputs, good.outputs, text, header)
        monkeypatch.setattr(prefill, "_COMBINE_NORM", bad)
        return "moe.combine_norm"

    def stop(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("[metal] command buffer failed in /Users/somebody/lily_mlx/kernels/x.metal")

    monkeypatch.setattr(decode, "_NORM_PROJECT", stop)
    return "linear.norm_project"
