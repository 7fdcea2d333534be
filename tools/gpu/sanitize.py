"""Runs the doctor's checks on an NVIDIA GPU under compute-sanitizer and notes the result for docs/kernels.md.

    python tools/gpu/sanitize.py [--tools memcheck racecheck initcheck synccheck] [--evidence FILE] [--logs DIRECTORY]

Each tool watches one process that runs every check of `lily_mlx doctor` at its small sizes; the tools run side by side.
A kernel's result counts the reports that name it. A tool whose errors name no kernel, or under which a check fails,
is left out of the result. Exit status 1 if any tool reports an error or a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lily_mlx.doctor.sizes import SMALL
from tools import kernel_evidence, kernels_table

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SECONDS = 540
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
# A report's first lines name the kernel it is about; the next report starts after an empty line.
_KERNEL = re.compile(r"lily_([a-z0-9_]+)_[0-9a-f]{16}")
# MLX copies whole buffers, to the host or with kernels of its own, with rows that nobody wrote or needs.
_HOST_COPY = re.compile(r"^Host API memory access error", re.MULTILINE)
_MLX_KERNEL = re.compile(r"^at (?:void )?mlx::core::cu::(?!custom_kernel_lily_)", re.MULTILINE)
_DROPPED = "Some records have been dropped"
# Every report, each without the stack of the host.
_OPTIONS = ("--print-limit", "1000000", "--show-backtrace", "no")
# Copies to the host alone would fill initcheck's buffer of records; and it follows launches one by one, not in graphs.
_OWN_OPTIONS = {"initcheck": ("--check-api-memory-access", "no")}
_OWN_ENVIRONMENT = {"initcheck": {"MLX_USE_CUDA_GRAPHS": "0"}}


def reports(log: str) -> tuple[int | None, dict[str, int]]:
    """Errors of kernels that a log of compute-sanitizer sums up (None: it has no summary), and reports by kernel.

    Copies to the host, and what MLX's own kernels read although nobody wrote it, are left out of both.
    """
    summary = _SUMMARY.search(log)
    by_kernel: dict[str, int] = {}
    text = "\n".join(line.removeprefix("=========").strip() for line in log.splitlines())
    others = len(_HOST_COPY.findall(text))
    for block in text.split("\n\n"):
        found = _KERNEL.search(block)
        if found:
            by_kernel[found.group(1)] = by_kernel.get(found.group(1), 0) + 1
        elif "Uninitialized __global__ memory read" in block and _MLX_KERNEL.search(block):
            others += 1
    return int(summary.group(1)) - others if summary else None, by_kernel


def results(names: Sequence[str], found: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """What the table says of each kernel, from the reports of each tool by kernel."""
    texts = {}
    for name in names:
        bad = [f"{tool}: {counts[name]} reports" for tool, counts in found.items() if counts.get(name)]
        texts[name] = "; ".join(bad) or f"clean ({', '.join(found)})"
    return texts


def watched() -> None:
    """The process that a tool watches: runs the checks and prints the kernels' names and the failed checks."""
    names: set[str] = set()
    failed = []
    for result, launched in kernel_evidence.checked_kernels(SMALL):
        names |= launched
        if not result.passed:
            failed.append(f"{result.function} {result.shape}: {result.reason}")
    print(json.dumps({"kernels": sorted(names), "failed": failed}))


def run(tools: Sequence[str], logs: Path) -> tuple[list[str], dict[str, dict[str, int]], list[str]]:
    """Kernels that ran, reports of each tool by kernel, and what went wrong."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    processes = {}
    for tool in tools:
        command = [program, "--tool", tool, *_OPTIONS, *_OWN_OPTIONS.get(tool, ())]
        command += ["--log-file", str(logs / f"{tool}.txt")]
        output = (logs / f"{tool}.out").open("w")
        processes[tool] = subprocess.Popen(
            [*command, sys.executable, __file__, "--watched"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_OWN_ENVIRONMENT.get(tool, {})},
        )
    names: set[str] = set()
    found: dict[str, dict[str, int]] = {}
    problems = []
    for tool, process in processes.items():
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            problems.append(f"{tool}: not done after {SECONDS} seconds")
            continue
        log = logs / f"{tool}.txt"
        text = log.read_text(errors="replace") if log.exists() else ""
        errors, by_kernel = reports(text)
        last = (logs / f"{tool}.out").read_text(errors="replace").strip().splitlines()[-1:]
        try:
            said = json.loads(last[0])
        except (IndexError, ValueError):
            problems.append(f"{tool}: the checks ended early (exit status {process.returncode}): {' '.join(last)}")
            continue
        names |= set(said["kernels"])
        problems += [f"{tool}: {text}" for text in said["failed"]]
        if _DROPPED in text:
            problems.append(f"{tool}: it dropped reports")
            continue
        if errors is None:
            problems.append(f"{tool}: its log has no summary")
            continue
        named = sum(by_kernel.values())
        if errors:
            problems.append(f"{tool}: {errors} errors, of which {named} name a kernel of ours")
        # Errors that name no kernel may be anybody's, and a kernel that failed its check did not do its work.
        if errors <= named and not said["failed"]:
            found[tool] = by_kernel
    return sorted(names), found, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--evidence", type=Path, default=kernels_table.ROOT / kernels_table.EVIDENCE)
    parser.add_argument("--logs", type=Path, help="keep the tools' logs here")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watched:
        watched()
        return
    with tempfile.TemporaryDirectory() as temporary:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        names, found, problems = run(options.tools, logs)
    texts = results(names, found)
    for name, text in texts.items():
        print(f"{name}: {text}")
    if found:
        kernels = {name: kernel for name, (_, kernel) in kernels_table.all_kernels().items()}
        command = f"python tools/gpu/sanitize.py --tools {' '.join(found)}"
        document: dict[str, Any] = kernel_evidence.document(kernels, texts, command)
        evidence = kernel_evidence.read(options.evidence)
        kernel_evidence.write(options.evidence, {**evidence, kernel_evidence.SANITIZERS: document})
    print("\n".join(problems))
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
