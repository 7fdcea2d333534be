"""The doctor's report: tables for people, JSON for bug reports."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .buffers import NOT_APPLICABLE, BufferTiming
from .check import Result
from .machine import without_private_words
from .routes import Route
from .sizes import FULL
from .timings import Timing

SCHEMA = 1


@dataclass
class Report:
    """Everything that the doctor found.

    Attributes:
        sizes: label of the shapes.
        machine: from `machine.describe`.
        buffers: None where the setting does not exist.
    """

    sizes: str
    machine: dict[str, str]
    routes: list[Route] = field(default_factory=list)
    checks: list[Result] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    buffers: list[BufferTiming] | None = None

    @property
    def failed(self) -> tuple[str, ...]:
        """The functions of which a check failed, in the order of the checks."""
        return tuple(dict.fromkeys(result.function for result in self.checks if not result.passed))

    @property
    def verdict(self) -> str:
        """One sentence."""
        functions = len({result.function for result in self.checks})
        if not self.checks:
            return "nothing was checked"
        if not self.failed:
            return f"all {functions} kernel functions agree with their references on this machine"
        return (
            f"{len(self.failed)} of {functions} kernel functions fail on this machine: {', '.join(self.failed)}. "
            "lily_mlx computes them with MLX's own operations here, which is slower. Please report this, with the "
            "output of `lily_mlx doctor --json`"
        )

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON, without paths, user names and host names."""
        found = {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "failed": list(self.failed),
            "sizes": self.sizes,
            "machine": self.machine,
            "checks": [_check_dict(result) for result in self.checks],
            "timings": [{**asdict(timing), "ratio": round(timing.ratio, 3)} for timing in self.timings],
            "buffers": NOT_APPLICABLE if self.buffers is None else [asdict(timing) for timing in self.buffers],
            "routes": [asdict(route) for route in self.routes],
        }
        clean: dict[str, Any] = without_private_words(found)
        return clean

    def text(self) -> str:
        """The report for a terminal."""
        parts = [
            "\n".join(f"{name + ':':10} {value}" for name, value in self.machine.items()),
            f"Routes at the shapes of {FULL.label}",
            _routes_table(self.routes),
            f"Kernels against their references, at the shapes of {self.sizes}",
            _checks_table(self.checks),
            *(f"FAILED {r.function} ({r.shape}): {r.reason}" for r in self.checks if not r.passed),
        ]
        if self.timings:
            parts += [
                "Milliseconds of one call, and of the MLX operations that it replaces",
                _timings_table(self.timings),
            ]
        parts.append("Launches in a command buffer (MLX_MAX_OPS_PER_BUFFER, MLX_MAX_MB_PER_BUFFER)")
        parts.append(NOT_APPLICABLE if self.buffers is None else _buffers_table(self.buffers))
        parts.append(f"Verdict: {self.verdict}.")
        return "\n\n".join(parts)


def _check_dict(result: Result) -> dict[str, Any]:
    outputs = [
        {"name": o.name, "error": o.error if math.isfinite(o.error) else None, "limit": o.limit, "passed": o.passed}
        for o in result.outputs
    ]
    return {
        "function": result.function,
        "shape": result.shape,
        "passed": result.passed,
        "outputs": outputs,
        "message": result.message,
        "seconds": round(result.seconds, 3),
    }


def _routes_table(routes: Iterable[Route]) -> str:
    """The choices, those of a function one below the other, each with the rule that makes it."""
    groups: dict[tuple[str, str], list[Route]] = defaultdict(list)
    for route in routes:
        groups[route.function, route.reason].append(route)
    blocks = []
    for (function, reason), members in groups.items():
        lines = [f"{function}: {reason}", *(f"  {route.shape}: {route.choice}" for route in members)]
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def _checks_table(results: Sequence[Result]) -> str:
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[result.function].append(result)
    rows = []
    for function, members in groups.items():
        shares = [o.error / o.limit for r in members for o in r.outputs if o.limit]
        worst = "-" if not shares else f"{max(shares):.0%}"
        passed = sum(result.passed for result in members)
        seconds = f"{sum(result.seconds for result in members):.1f}"
        rows.append(
            [function, f"{passed}/{len(members)}", worst, seconds, "ok" if passed == len(members) else "FAILED"]
        )
    return _table(["function", "passed", "largest error of its limit", "seconds", "result"], rows)


def _timings_table(timings: Iterable[Timing]) -> str:
    rows = []
    for t in timings:
        figures = ["-", "-", t.problem] if t.problem else [f"{t.ours:.3f}", f"{t.mlx:.3f}", f"{t.ratio:.2f} x"]
        rows.append([t.function, t.shape, *figures])
    return _table(["function", "shape", "lily_mlx", "MLX", "faster"], rows)


def _buffers_table(timings: Iterable[BufferTiming]) -> str:
    rows = [[t.setting, t.problem or f"{t.milliseconds:.3f}"] for t in timings]
    return _table(["setting", "milliseconds of a step"], rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (headings, *rows)]
    return "\n".join(line.rstrip() for line in lines)
