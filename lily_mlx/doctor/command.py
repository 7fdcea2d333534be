"""The command `lily_mlx doctor`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence

from lily_mlx.metal import KernelError, current_backend, use_backend

from . import check, machine, selftest
from .buffers import compare_settings
from .checks import all_checks
from .report import Report
from .routes import routes
from .sizes import FULL, SMALL, Sizes
from .timings import time_pairs

DESCRIPTION = (
    "Checks lily_mlx on this machine: names the device and the routes that kernels take, compares every kernel with "
    "its reference, and times the main ones against the MLX operations that they replace."
)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a kernel fails, 2 if nothing could be checked."""
    parser = argparse.ArgumentParser(prog="lily_mlx doctor", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print JSON, to attach to a bug report")
    parser.add_argument(
        "--quick", action="store_true", help="small shapes, as always on the cpu backend, which is too slow for others"
    )
    parser.add_argument("--backend", choices=("metal", "cuda", "cpu"), help="where kernels run")
    parser.add_argument("--no-timings", action="store_true", help="only compare results")
    options = parser.parse_args(arguments)
    try:
        with _backend(options.backend):
            sizes = SMALL if options.quick or current_backend() == "cpu" else FULL
            report = examine(sizes, timings=not options.no_timings)
            if sizes is FULL:
                selftest.remember(report.checks)
    except KernelError as error:
        print(f"lily_mlx doctor: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.as_dict(), indent=1) if options.json else report.text())
    return 1 if report.failed else 0


def examine(sizes: Sizes, timings: bool = True) -> Report:
    """Makes the whole report at some sizes. Progress goes to a terminal's standard error."""
    # Routes are those of the full-size model, whatever the shapes of the checks.
    report = Report(sizes.label, machine.describe(), list(routes(FULL)))
    checks = all_checks(sizes)
    for number, result in enumerate(check.run(checks), start=1):
        report.checks.append(result)
        _progress(f"{number}/{len(checks)} {result.function}")
    if timings:
        for timing in time_pairs(sizes):
            report.timings.append(timing)
            _progress(f"timed {timing.function}")
        report.buffers = compare_settings(sizes)
    _progress("")
    return report


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _backend(name: str | None) -> Iterator[None]:
    with use_backend(name) if name else contextlib.nullcontext():
        yield
