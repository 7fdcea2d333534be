"""What shows that a kernel works: a JSON file that tools write, with one entry for each kernel and kind of evidence.

An entry belongs to one text of the kernel, named by a digest. When the text changes, the entry says so until it is
recorded again.
"""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lily_mlx.doctor import check, machine
from lily_mlx.doctor.checks import all_checks
from lily_mlx.doctor.selftest import TILED
from lily_mlx.doctor.sizes import FULL, SMALL, Sizes
from lily_mlx.metal import Kernel, checked, current_backend, matrix_engine, use_matrix_engine

FRONT_END, SANITIZERS = "front end", "sanitizers"
KINDS = (FRONT_END, "cpu", "cuda", SANITIZERS, "metal")

Evidence = dict[str, dict[str, Any]]


def read(path: Path) -> Evidence:
    """The file's content; nothing where there is none.

    Raises:
        ValueError: a kind of evidence that no column shows.
    """
    found: Evidence = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    unknown = set(found) - set(KINDS)
    if unknown:
        raise ValueError(f"{path} holds evidence of kinds {sorted(unknown)}; there are {', '.join(KINDS)}")
    return found


def write(path: Path, evidence: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def shown(evidence: Evidence, kind: str, kernel: Kernel) -> str:
    """The cell of a table."""
    absent = "not yet run" if kind == "metal" else "not recorded"
    entry = evidence.get(kind, {}).get("kernels", {}).get(kernel.name)
    if entry is None:
        return absent
    result = str(entry["result"])
    return result if entry["digest"] == kernel.text.digest else f"{result} (of an earlier text)"


def source(evidence: Evidence, kind: str) -> str:
    """A sentence about a kind of evidence: when, where and by which command."""
    found = evidence.get(kind)
    if not found:
        return "not yet run" if kind == "metal" else "not recorded"
    return f"{found['date']}, {found['device']}, MLX {found['mlx']}: `{found['command']}`"


def record_front_end(kernels: Mapping[str, Kernel]) -> dict[str, Any]:
    """Compiles every text for Apple devices with the front end."""
    from lily_mlx.metal.check.check import check_texts
    from lily_mlx.metal.check.texts import collect

    texts: dict[str, int] = {}
    errors: dict[str, int] = {}
    for result in check_texts(collect()):
        name = result.unit.name
        texts[name] = texts.get(name, 0) + max(1, len(result.unit.instantiations))
        errors[name] = errors.get(name, 0) + len(result.findings)
    results = {
        name: f"{errors[name]} errors" if errors[name] else f"passed, {count} instantiations"
        for name, count in texts.items()
    }
    return document(kernels, results, "python -m lily_mlx.metal.check")


def record_checks(kernels: Mapping[str, Kernel]) -> tuple[str, dict[str, Any]]:
    """Runs the doctor's checks on the current backend, in checked mode on `cpu`; returns the backend's name too."""
    backend = current_backend()
    sizes = SMALL if backend == "cpu" else FULL
    passed: dict[str, int] = {}
    failed: dict[str, int] = {}
    with checked(backend == "cpu"):
        for result, names in checked_kernels(sizes):
            for name in names:
                counts = passed if result.passed else failed
                counts[name] = counts.get(name, 0) + 1
    results = {}
    for name in passed.keys() | failed.keys():
        bad, good = failed.get(name, 0), passed.get(name, 0)
        results[name] = (
            f"{bad} of {bad + good} checks fail" if bad else f"{good} {'check' if good == 1 else 'checks'} passed"
        )
    return backend, document(kernels, results, f"python -m tools.kernels_table --record checks --backend {backend}")


def checked_kernels(sizes: Sizes) -> Iterator[tuple[check.Result, set[str]]]:
    """The result of each of the doctor's checks, and the names of the kernels that it launched.

    Those of the tiled products in the longest chunk come once more, with the engine that is not in use.
    """
    items = all_checks(sizes)
    for item in items:
        with launched() as names:
            (result,) = check.run([item])
        yield result, names
    # The tiled products with the other engine too, where the backend has both.
    other = "simdgroup" if matrix_engine() == "tensor" else "tensor"
    if other == "tensor" and current_backend() == "metal":
        return
    for item in items:
        if item.function in TILED and item.shape.startswith(f"{max(sizes.rows)} rows"):
            with launched() as names, use_matrix_engine(other):
                (result,) = check.run([item])
            yield result, names


def merge(into: Evidence, other: Evidence) -> Evidence:
    """The evidence of another file in place of what has the same kind."""
    return {**into, **other}


@contextmanager
def launched() -> Iterator[set[str]]:
    """Notes the names of the kernels that are launched inside the block."""
    names: set[str] = set()
    call = Kernel.__call__

    def noted(self: Kernel, *arguments: Any, **options: Any) -> Any:
        names.add(self.name)
        return call(self, *arguments, **options)

    Kernel.__call__ = noted  # type: ignore[method-assign]
    try:
        yield names
    finally:
        Kernel.__call__ = call  # type: ignore[method-assign]


def document(kernels: Mapping[str, Kernel], results: Mapping[str, str], command: str) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": machine.device_name(),
        "os": platform.system(),
        "mlx": version("mlx"),
        "command": command,
        "kernels": {
            name: {"result": result, "digest": kernels[name].text.digest}
            for name, result in sorted(results.items())
            if name in kernels
        },
    }
