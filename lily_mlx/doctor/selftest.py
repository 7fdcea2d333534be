"""The short form of the doctor: run once for each device and version, before the engine's first token.

A kernel that fails is replaced by MLX operations, with one warning. The verdict is kept in the user's cache
directory, so that later processes only read it. It runs on Apple GPUs; on `cpu` and `cuda` the repository's own tests
have run the kernels, and on `cuda` compiling the checks takes a minute. LILY_MLX_SELF_TEST=1 asks for it there,
LILY_MLX_SELF_TEST=0 skips it everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from lily_mlx import fallback
from lily_mlx.metal import current_backend, matrix_engine
from lily_mlx.metal.cpu.compiler import cache_directory
from lily_mlx.metal.matrix_engines import TENSOR, refuse_tensor_engine
from lily_mlx.metal.verdicts import ENDED, is_alive, write_note

from . import check, machine
from .check import Check, Result
from .checks import all_checks
from .sizes import SHORT, SMALL

ENVIRONMENT = "LILY_MLX_SELF_TEST"
# The functions whose kernels come with both engines of matrix products.
TILED = ("linear.matmul", "moe.grouped_gate_up", "moe.grouped_down", "mlp.gate_up_chunk")

logger = logging.getLogger("lily_mlx")

Failures = dict[str, str]  # what went wrong, by function

_tested: set[str] = set()


def replace_failing_kernels() -> bool:
    """Runs the short form, or reads its verdict, once in a process and backend.

    Returns:
        Whether a kernel function was replaced just now.
    """
    backend = current_backend()
    if backend in _tested or not is_wanted(backend):
        return False
    _tested.add(backend)
    failures = verdict()
    if not failures:
        return False
    logger.warning(
        "%s on this machine, so lily_mlx uses MLX's own operations instead, which are slower: %s. "
        "Run `lily_mlx doctor` for details, and please report it",
        "a kernel does not work" if len(failures) == 1 else f"{len(failures)} kernels do not work",
        "; ".join(f"{name} ({_first_line(reason)})" for name, reason in failures.items()),
    )
    return fallback.use(failures)


def is_wanted(backend: str) -> bool:
    """Whether the short form runs on a backend: only on `metal`, unless LILY_MLX_SELF_TEST says otherwise."""
    given = os.environ.get(ENVIRONMENT, "")
    return backend == "metal" if given == "" else given != "0"


def verdict() -> Failures:
    """What fails on this device, from the cache or from running the checks now."""
    path = _path()
    known = _read(path)
    if known is not None:
        return known
    print("lily_mlx: checking the kernels on this device, once for each version ...", file=sys.stderr)
    failures = _run(_checks(), path.with_suffix(".running"))
    if _refuses_tensors(failures):
        return verdict()
    _write(path, failures)
    return failures


def remember(results: Iterable[Result]) -> None:
    """Keeps the verdict of the long form, which later processes use as their own."""
    failures = _failures(results)
    if not _refuses_tensors(failures):
        _write(_path(), failures)


def _refuses_tensors(failures: Failures) -> bool:
    """Goes back to simdgroup matrices if a tiled product fails with tensor operations, with one warning."""
    wrong = [name for name in TILED if name in failures]
    if not wrong or matrix_engine() != TENSOR:
        return False
    return refuse_tensor_engine(f"{wrong[0]}: {_first_line(failures[wrong[0]])}")


def _checks() -> list[Check]:
    return all_checks(SMALL if current_backend() == "cpu" else SHORT)


def _run(checks: list[Check], journal: Path) -> Failures:
    """Runs checks with a note of the one that runs, for the case that it takes the process with it."""
    failures = _ended_in(journal)
    for item in checks:
        # One failure decides about a function; and what ended a process is not tried again.
        if item.function in failures:
            continue
        write_note(journal, {"process": os.getpid(), "running": item.function, "failed": failures})
        try:
            failures |= _failures(check.run([item]))
        except BaseException:  # Ctrl-C says nothing about the kernel that ran
            write_note(journal, {"process": os.getpid(), "running": None, "failed": failures})
            raise
    with contextlib.suppress(OSError):
        journal.unlink(missing_ok=True)
    return failures


def _failures(results: Iterable[Result]) -> Failures:
    failures: Failures = {}
    for result in results:
        if not result.passed:
            failures.setdefault(result.function, f"{result.shape}: {result.reason}")
    return failures


def _ended_in(journal: Path) -> Failures:
    """What an earlier process found before a check ended it."""
    try:
        noted = json.loads(journal.read_text(encoding="utf-8"))
        if is_alive(int(noted["process"])):
            return {}
        ended = {str(noted["running"]): ENDED} if noted["running"] else {}
        return {**noted["failed"], **ended}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _path() -> Path:
    """Where the verdict is kept: a file for each device, system, MLX, backend, engine of products and source text."""
    told = machine.describe()
    names = ("device", "os", "python", "mlx", "source", "backend")
    key = hashlib.sha256("\0".join([*(told[name] for name in names), matrix_engine()]).encode()).hexdigest()[:20]
    return cache_directory() / "verdicts" / f"{told['backend']}-{key}.json"


def _read(path: Path) -> Failures | None:
    try:
        failed = json.loads(path.read_text(encoding="utf-8"))["failed"]
        return {str(name): str(reason) for name, reason in failed.items() if name in fallback.NAMES}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def _write(path: Path, failures: Failures) -> None:
    write_note(path, {"machine": machine.describe(), "failed": failures})


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"
