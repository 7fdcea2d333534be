"""Result files: their schema, the correctness gate, and the environment they are valid for."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

RESULTS = Path(__file__).parent / "results"
KINDS = ("sweep", "kernels", "consistency", "ablations", "launches", "batch", "peer")
# Kinds whose rows hold speeds, so that a red gate forbids writing them.
TIMED_KINDS = ("sweep", "kernels", "ablations", "batch")


class GateError(RuntimeError):
    """The correctness gate of a run is red, so its speeds are not reported."""


@dataclass
class Gate:
    """What a run checked before it may report a speed."""

    checks: list[dict[str, Any]] = field(default_factory=list)

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Records a figure that must not exceed `limit`. NaN never passes."""
        self.checks.append({"name": name, "value": value, "limit": limit, "passed": bool(value <= limit)})

    def at_least(self, name: str, value: float, limit: float) -> None:
        """Records a figure that must reach `limit`. NaN never passes."""
        self.checks.append({"name": name, "value": value, "least": limit, "passed": bool(value >= limit)})

    def equal(self, name: str, values: Sequence[Any]) -> None:
        """Records values that must all be the same, such as the digests of repeated rounds."""
        passed = bool(values) and len(set(values)) == 1
        self.checks.append({"name": name, "value": sorted({str(v) for v in values}), "passed": passed})

    def extend(self, other: Mapping[str, Any], prefix: str = "") -> None:
        """Takes over the checks of a part that ran in another process."""
        self.checks.extend({**check, "name": prefix + check["name"]} for check in other["checks"])

    @property
    def is_green(self) -> bool:
        return bool(self.checks) and all(check["passed"] for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {"green": self.is_green, "checks": self.checks}

    def require_green(self) -> None:
        """Raises GateError, naming the failed checks, unless every check passed."""
        if self.is_green:
            return
        failed = [check for check in self.checks if not check["passed"]]
        reasons = "; ".join(f"{c['name']} = {c['value']} (limit {c.get('limit', c.get('least'))})" for c in failed)
        raise GateError(f"no speed is reported, the correctness gate is red: {reasons or 'nothing was checked'}")


def spread(values: Sequence[float]) -> float:
    """(max - min) / median of repeated rounds."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def require_steady(values: Sequence[float], limit: float, name: str) -> None:
    """Raises GateError where repeated rounds drift apart by more than `limit` of their median."""
    drift = spread(values)
    if not drift <= limit:
        raise GateError(
            f"no speed is reported: the rounds of {name} differ by {drift:.1%} of their median, more than "
            f"{limit:.0%}; wait for the machine to be idle and cool, or use more rounds"
        )


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


@functools.cache
def device_name() -> str:
    """The name of the device that MLX computes on."""
    info = mx.device_info() if mx.default_device() == mx.gpu else {}
    if "device_name" in info:
        return str(info["device_name"])
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"CPU: {line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"CPU: {platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit of the source tree, marked where files differ from it."""
    given = os.environ.get("LILY_MLX_COMMIT")
    if given:
        return given
    try:
        root = Path(__file__).resolve().parent.parent

        def git(*words: str) -> str:
            return subprocess.run(
                ["git", "-C", str(root), *words], check=True, capture_output=True, text=True
            ).stdout.strip()

        changed = "+changes" if git("status", "--porcelain", "--", "lily_mlx", "compare") else ""
        return git("rev-parse", "--short=12", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command() -> str:
    """The command line of this process, as a user would type it."""
    arguments = list(sys.argv)
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        return shlex.join(["python", "-m", name, *arguments[1:]])
    return shlex.join(["python", Path(arguments[0]).name, *arguments[1:]])


def document(kind: str, rows: Sequence[Mapping[str, Any]], *, seed: int, gate: Gate, **extra: Any) -> dict[str, Any]:
    """A result as it is written: the schema that every reader of `compare/results` relies on."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    return {
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "command": command(),
        "device": device_name(),
        "os": platform.platform(),
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(name) for name in ("mlx", "mlx-lm", "lily_mlx", "numpy")},
        },
        "seed": seed,
        "gate": gate.as_dict(),
        **extra,
        "rows": [dict(row) for row in rows],
    }


def write(
    kind: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    seed: int,
    gate: Gate,
    directory: Path | None = None,
    name: str = "",
    **extra: Any,
) -> Path:
    """Writes `<date>-<kind>[-<name>].json` and returns its path.

    Raises:
        GateError: the kind holds speeds and the gate is red.
    """
    if kind in TIMED_KINDS:
        gate.require_green()
    result = document(kind, rows, seed=seed, gate=gate, **extra)
    directory = directory or Path(os.environ.get("LILY_MLX_RESULTS", RESULTS))
    directory.mkdir(parents=True, exist_ok=True)
    stem = "-".join(part for part in (result["date"][:19].replace(":", "").replace("T", "-"), kind, name) if part)
    path = directory / f"{stem}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def read_all(directory: Path = RESULTS) -> list[dict[str, Any]]:
    """Every result in a directory, oldest first."""
    found = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    return sorted(found, key=lambda result: str(result.get("date", "")))


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, with numbers aligned right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(h), *(len(row[i]) for row in cells)) if cells else len(h) for i, h in enumerate(headings)]
    numeric = [all(isinstance(row[i], (int, float)) or row[i] is None for row in rows) for i in range(len(headings))]

    def line(values: Sequence[str]) -> str:
        pads = (v.rjust(w) if n else v.ljust(w) for v, w, n in zip(values, widths, numeric, strict=True))
        return "| " + " | ".join(pads) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True)) + "|"
    return "\n".join([line(headings), rule, *(line(row) for row in cells)])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        magnitude = abs(value)
        if magnitude and magnitude < 0.01:
            return f"{value:.1e}"
        return f"{value:,.0f}" if magnitude >= 1000 else f"{value:,.1f}" if magnitude >= 100 else f"{value:.2f}"
    return str(value)
