"""`python -m compare.kernels`: each of our kernels against the chain of operations that it replaces.

At the shapes of the full-size model, side by side on the same inputs: our kernel, MLX's operations on this
device as mlx-lm calls them, and the same chain by MLX's own Metal kernels run through our runtime. Every
result is compared with the definition in float64 before anything is timed; our kernels' errors are the gate.
Bytes and operations are those of the shapes; their ceilings, a copy and a matrix product, are measured on the
device, and for matrix-vector kernels so is a kernel that only reads the same bytes. Times are the device's own where
they can be had (`compare/device_time.py`), else those of the wall clock; the result says which.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from lily_mlx.metal import current_backend
from lily_mlx.model import arrays_of

from . import device_time, results, timing
from .kernel_cases import MLX_METAL, MLX_OPS, OURS, READ_ONLY, Case, Error, UnavailableError, all_cases, select
from .kernel_cases.operations import MetalKernels, make_operations
from .kernel_cases.reading import LaunchShape, Reading, read, recorded_launches
from .kernel_cases.source import Source
from .progress import progress

COLD_BYTES = 256 << 20  # read in turn, so that no cache keeps a weight until it is read again
MOST_COPIES = 256
MEMORY_BYTES = 8 << 30
SLOW_CALL_SECONDS = 0.1  # a call that takes longer is timed alone
BASELINE_LIMIT = 0.2  # MLX on a CPU sums in bfloat16 and reaches 0.1; a larger error computes something else
BASELINES = (MLX_OPS, MLX_METAL)
DRIFT = 0.3
CLOCKS: dict[str, timing.Rounds] = {"wall": timing.wall_rounds, "device": device_time.device_rounds}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare.kernels", description=__doc__)
    parser.add_argument("--cases", nargs="+", default=[], metavar="PATTERN", help="names of cases, with * and ?")
    parser.add_argument("--phase", choices=("decode", "prefill"), help="only this phase")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for tests on a CPU")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each arm")
    parser.add_argument("--drift", type=float, default=DRIFT, help="largest spread between rounds")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="device" if device_time.is_available() else "wall",
        help="device: the time in which kernels ran (NVIDIA, with torch installed); wall: with the host's work",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--no-write", action="store_true", help="do not write a result file")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: give at least 1")
    if options.clock == "device" and not device_time.is_available():
        parser.error("--clock device needs an NVIDIA GPU and torch: install torch or use --clock wall")
    return options


def ceilings(options: argparse.Namespace) -> dict[str, float]:
    """Bytes per second of a copy, operations per second of a matrix product, seconds of an empty kernel."""
    on_cpu, sample = current_backend() == "cpu", CLOCKS[options.clock]
    size = 1 << 22 if options.small else 1 << 27 if on_cpu else 1 << 30
    matrix = 256 if options.small else 1024 if on_cpu else 8192
    found = {
        "copy_bytes_per_s": timing.copy_bandwidth(size, options.rounds, options.drift, sample),
        "matrix_flops_per_s": timing.matrix_rate(matrix, options.rounds, options.drift, sample),
        "matrix_size": matrix,
        "launch_s": timing.launch_floor(options.rounds, options.drift, calls=16 if on_cpu else 256),
    }
    mx.clear_cache()
    return found


class CaseRun:
    """One case: its inputs, its errors, its arms."""

    def __init__(self, case: Case, seed: int):
        self.case = case
        self._source = Source(seed, case.name)
        self._fixed = case.fixed(self._source)
        self.copies = [self._copy()]
        self.launches: list[LaunchShape] = []
        self.functions: dict[str, Callable[..., list[mx.array]]] = {OURS: case.ours}
        self.operations = {name: make_operations(name) for name in BASELINES}
        for name, operations in self.operations.items():
            self.functions[name] = functools.partial(case.chain, operations)
        self.functions |= case.others()

    def _copy(self) -> dict[str, Any]:
        inputs = self._fixed | self.case.varying(self._source, self._fixed)
        mx.eval(arrays_of(tuple(inputs.values())))
        return inputs

    @property
    def metal_kernels(self) -> list[str]:
        """Kernels of MLX that the Metal chain ran, after it ran."""
        operations = self.operations[MLX_METAL]
        return sorted(operations.used) if isinstance(operations, MetalKernels) else []

    def make_copies(self) -> None:
        """As many copies of the inputs as keep them out of caches and fit into the memory."""
        wanted = min(MOST_COPIES, math.ceil(COLD_BYTES / self.case.bytes)) if current_backend() != "cpu" else 2
        size = sum(a.nbytes for a in arrays_of(tuple(self.copies[0].values())))
        size -= sum(a.nbytes for a in arrays_of(tuple(self._fixed.values())))
        wanted = max(1, min(wanted, MEMORY_BYTES // max(size, 1)))
        while len(self.copies) < wanted:
            self.copies.append(self._copy())

    def errors(self, name: str) -> tuple[list[Error], timing.Arm]:
        """Runs an arm once, compares its outputs, and makes it ready for timing."""
        with recorded_launches() as launches:
            outputs = self.functions[name](self.copies[0])
        mx.eval(outputs)
        if name == OURS:
            self.launches = launches
        elif name == MLX_METAL and not self.metal_kernels:
            raise UnavailableError("the installed package has no Metal text of any kernel of this chain")
        errors = self.case.errors(name, self.copies[0], outputs)
        links = self.case.links(name, outputs)
        mx.eval(links)
        del outputs
        start = time.perf_counter()
        mx.eval(self.functions[name](self.copies[0]))
        is_slow = time.perf_counter() - start > SLOW_CALL_SECONDS
        self.make_copies()
        copies = self.copies[:1] if is_slow else self.copies
        calls = [functools.partial(self._call, name, inputs) for inputs in copies]
        return errors, timing.Arm(name, calls, links, compiled=not is_slow)

    def _call(self, name: str, inputs: dict[str, Any], links: timing.Links) -> tuple[timing.Links, list[mx.array]]:
        outputs = self.functions[name](inputs | links)
        following = self.case.links(name, outputs)
        # What the next call takes over is computed anyway; holding it would forbid MLX to update it in place.
        return following, [x for x in outputs if not any(x is link for link in following.values())]

    def read_only(self) -> tuple[timing.Arm, int] | None:
        """The arm that only reads the weights, and the bytes that it reads."""
        readings = [reading for inputs in self.copies if (reading := self.case.reading(inputs)) is not None]
        if not readings:
            return None
        launch = self.launches[-1]

        def call(reading: Reading, links: timing.Links) -> tuple[timing.Links, list[mx.array]]:
            return {"previous": read(reading, launch, links["previous"])}, []

        calls = [functools.partial(call, reading) for reading in readings]
        first = read(readings[0], launch, mx.zeros(8, mx.uint32))
        return timing.Arm(READ_ONLY, calls, {"previous": first}), readings[0].bytes


def run_case(case: Case, options: argparse.Namespace, gate: results.Gate, limits: dict[str, float]) -> dict[str, Any]:
    """Errors and, while the gate is green, times of one case."""
    row: dict[str, Any] = {
        "name": case.name,
        "family": case.family,
        "phase": case.phase,
        "shape": case.shape,
        "calls_per_step": case.calls_per_step,
        "bytes": case.bytes,
        "flops": case.flops,
    }
    arms: list[timing.Arm] = []
    try:
        run = CaseRun(case, options.seed)
        errors, arm = run.errors(OURS)
    except Exception as problem:
        gate.at_most(f"{case.name} failed: {_message(problem)}", math.nan, 0.0)
        return row
    arms.append(arm)
    for found in errors:
        gate.at_most(f"{case.name}: {found.output}", found.value, found.limit)
    worst = max(errors, key=lambda e: e.value / e.limit if e.limit else e.value)
    row |= {"error": worst.value, "error_limit": worst.limit, "errors": {e.output: e.value for e in errors}}
    row |= {"copies": len(run.copies), "chained": bool(arm.links)}
    baselines = {name: _baseline(run, name, arms) for name in run.functions if name != OURS}
    row["mlx_metal_kernels"] = run.metal_kernels
    if not gate.is_green:
        return row
    arms[0].warm_up()
    reading = run.read_only()
    if reading is not None:
        reading[0].warm_up()
        arms.append(reading[0])
    measured = timing.measure(arms, options.rounds, options.drift, sample=CLOCKS[options.clock])
    for name, baseline in baselines.items():
        found_time = measured.get(name)
        if isinstance(found_time, str):
            baseline["message"] = found_time
        elif found_time is not None:
            baseline |= {"seconds": found_time.seconds, "spread": found_time.spread}
    for name in BASELINES:
        row |= {f"{name}_{key}": value for key, value in baselines.pop(name).items()}
    row["others"] = baselines
    return row | _times(row, measured, gate, options.drift, limits, reading[1] if reading else None)


def _baseline(run: CaseRun, name: str, arms: list[timing.Arm]) -> dict[str, Any]:
    """Runs a baseline and, where its result is right, adds it to the arms. Its failure is recorded."""
    found: dict[str, Any] = {"seconds": None, "spread": None, "error": None, "message": None}
    try:
        errors, arm = run.errors(name)
        found["error"] = max(e.value for e in errors)
        _require_comparable(errors)
        arm.warm_up()
        arms.append(arm)
    except Exception as problem:
        found["message"] = _message(problem)
    return found


def _require_comparable(errors: Sequence[Error]) -> None:
    worst = max(errors, key=lambda e: e.value)
    if not worst.value <= BASELINE_LIMIT:
        raise ValueError(f"not timed: its error of {worst.output}, {worst.value:.2g}, exceeds {BASELINE_LIMIT:.2g}")


def _message(problem: Exception) -> str:
    text = " ".join(str(problem).split()) or "no message"
    return f"{type(problem).__name__}: {text[:400]}"


def _times(
    row: dict[str, Any],
    measured: dict[str, timing.Measurement | str],
    gate: results.Gate,
    drift: float,
    limits: dict[str, float],
    read_bytes: int | None,
) -> dict[str, Any]:
    times: dict[str, Any] = {}
    ours = measured[OURS]
    if isinstance(ours, str):
        gate.at_most(f"{row['name']}: {ours}", math.inf, drift)
        return times
    seconds = ours.seconds
    times |= {
        "seconds": seconds,
        "spread": ours.spread,
        "rounds": list(ours.rounds),
        "bytes_per_s": row["bytes"] / seconds,
        "share_of_copy": row["bytes"] / seconds / limits["copy_bytes_per_s"],
        "flops_per_s": row["flops"] / seconds if row["flops"] else None,
        "share_of_matrix": row["flops"] / seconds / limits["matrix_flops_per_s"] if row["flops"] else None,
    }
    times |= {"read_only_seconds": None, "read_only_bytes": read_bytes, "share_of_read_only": None}
    reading = measured.get(READ_ONLY)
    if isinstance(reading, str):
        times["read_only_message"] = reading
    elif reading is not None:
        times |= {"read_only_seconds": reading.seconds, "share_of_read_only": reading.seconds / seconds}
    return times


def summarise(rows: Sequence[dict[str, Any]], every: Sequence[Case]) -> list[dict[str, Any]]:
    """Sums over a decode step at each context and over a prefill chunk at each size and context.

    A sum is given where every kernel of the step was timed. Where a chain of MLX's Metal kernels is missing,
    MLX's operations stand in for it; `substituted` names those.
    """
    by_name = {row["name"]: row for row in rows if row.get("seconds") is not None}
    found = []
    for phase, size, context in sorted({(c.phase, *_place(c)) for c in every if "context" in c.shape}):
        parts = [c for c in every if c.phase == phase and _belongs(c, size, context)]
        if any(part.name not in by_name for part in parts) or (phase == "prefill" and not _is_whole(parts)):
            continue
        own = [by_name[part.name] for part in parts]
        line: dict[str, Any] = {"phase": phase, "rows": size, "context": context, "seconds": _total(own, "seconds")}
        substituted = [row["name"] for row in own if row["mlx_metal_seconds"] is None]
        line["mlx_ops_seconds"] = _total(own, "mlx_ops_seconds")
        line["mlx_metal_seconds"] = _total(own, "mlx_metal_seconds", "mlx_ops_seconds")
        line["substituted"] = substituted
        for name in BASELINES:
            theirs = line[f"{name}_seconds"]
            line[f"ratio_to_{name}"] = theirs / line["seconds"] if theirs is not None else None
        found.append(line)
    return found


def _place(case: Case) -> tuple[int, int]:
    """(rows, context) of a case; a decode step has one row."""
    return case.shape.get("rows", 1), case.shape["context"]


def _belongs(case: Case, size: int, context: int) -> bool:
    shape = case.shape
    rows = 1 if case.phase == "decode" else shape["rows"]
    return rows == size and shape.get("context", context) == context


def _is_whole(parts: Sequence[Case]) -> bool:
    return {part.family for part in parts} == {"linear", "deltanet", "attention", "moe", "sampling"}


def _total(rows: Sequence[dict[str, Any]], *keys: str) -> float | None:
    """Seconds of all calls by the first of `keys` that a row has; None if a row has none of them."""
    total = 0.0
    for row in rows:
        seconds = next((row[key] for key in keys if row[key] is not None), None)
        if seconds is None:
            return None
        total += row["calls_per_step"] * seconds
    return total


def as_table(rows: Sequence[dict[str, Any]], summary: Sequence[dict[str, Any]]) -> str:
    """The cases, the sums, and why a baseline is missing."""

    def ratio(row: dict[str, Any], name: str) -> float | None:
        theirs = row[f"{name}_seconds"]
        return theirs / row["seconds"] if theirs is not None else None

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{share:.0%}"

    cases = [
        [
            row["name"],
            row["calls_per_step"],
            row["seconds"] * 1e6,
            row["bytes_per_s"] / 1e9,
            percent(row["share_of_copy"]),
            percent(row["share_of_read_only"]),
            row["flops_per_s"] / 1e12 if row["flops_per_s"] else None,
            percent(row["share_of_matrix"]),
            row["error"],
            ratio(row, MLX_OPS),
            ratio(row, MLX_METAL),
            percent(row["spread"]),
        ]
        for row in rows
    ]
    headings = ["kernel", "calls", "us", "GB/s", "of copy", "of reading", "TFLOP/s", "of matrix", "error"]
    text = results.table([*headings, "x MLX", "x MLX Metal", "spread"], cases)
    if summary:
        sums = [
            [s["phase"], s["rows"], s["context"], s["seconds"] * 1e3, s["ratio_to_mlx_ops"], s["ratio_to_mlx_metal"]]
            for s in summary
        ]
        text += "\n\n" + results.table(["phase", "rows", "context", "ms, sum", "x MLX", "x MLX Metal"], sums)
    missing = [
        f"{row['name']}, {name}: {row[f'{name}_message']}"
        for name in BASELINES
        for row in rows
        if row[f"{name}_message"]
    ]
    return text + ("\n\nNot measured:\n" + "\n".join(missing) if missing else "")


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    every = all_cases(options.small)
    try:
        chosen = list(select(every, options.cases, options.phase))
    except ValueError as problem:
        raise SystemExit(f"--cases: {problem}") from None
    if options.list:
        print("\n".join(case.name for case in chosen))
        return
    gate = results.Gate()
    limits = ceilings(options)
    rows = []
    for case in progress(chosen, "kernels"):
        start = time.perf_counter()
        rows.append(run_case(case, options, gate, limits))
        mx.clear_cache()
        if not sys.stderr.isatty():
            print(f"{case.name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    gate.require_green()
    summary = summarise(rows, every)
    extra: dict[str, Any] = {
        "ceilings": limits,
        "summary": summary,
        "backend": current_backend(),
        "clock": options.clock,
    }
    if options.json:
        print(json.dumps(results.document("kernels", rows, seed=options.seed, gate=gate, **extra)))
    else:
        print(as_table(rows, summary))
        print(
            f"\nCopy {limits['copy_bytes_per_s'] / 1e9:,.0f} GB/s, matrix product "
            f"{limits['matrix_flops_per_s'] / 1e12:,.1f} TFLOP/s, empty kernel {limits['launch_s'] * 1e6:.2f} us; "
            f"times by the {options.clock} clock"
        )
    if not options.no_write:
        settings = {k: v for k, v in vars(options).items() if k not in ("no_write", "json", "list")}
        name = "small" if options.small else ""
        path = results.write("kernels", rows, seed=options.seed, gate=gate, name=name, settings=settings, **extra)
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
