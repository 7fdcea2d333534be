"""Which instructions multiply the tiles of prefill: simdgroup matrices, or Metal 4's tensor operations.

Simdgroup matrices are in every Apple GPU. Tensor operations run on the matrix units that GPUs have from M5 on. They
are chosen only where three things hold: the device is of GPU generation 17 (18 where the architecture's name ends in
"p"), the system is macOS 26.2 or newer (both are MLX's own conditions), and a small product of integers comes out
right, because compilers of both systems are known that reject or miscompile such kernels. The verdict is kept for each
device, system and version. LILY_MLX_MATRIX_ENGINE=simdgroup or =tensor decides instead; on `cpu` and `cuda`, where
nothing else chooses them, tensor operations are there for tests.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from .backend import current_backend
from .cpu.compiler import cache_directory
from .errors import BackendError
from .kernel import Kernel
from .verdicts import ENDED, is_alive, write_note

ENVIRONMENT = "LILY_MLX_MATRIX_ENGINE"
SIMDGROUP, TENSOR = "simdgroup", "tensor"
NAMES = (SIMDGROUP, TENSOR)
OLDEST_SYSTEM = (26, 2)

logger = logging.getLogger("lily_mlx")

CHECK = Kernel(
    name="tensor_check",
    inputs=("a", "b"),
    outputs=("out",),
    body="metal/tensor_check.metal",
    headers=("metal/include/tensor_engine.h",),
)
# M, N and K of a simdgroup, as the kernels' tiles have them.
CHECKED_SHAPES = ((32, 32, 64), (16, 32, 64), (64, 32, 32))

_override: str | None = None
_refused = ""  # what a kernel did wrong with tensor operations in this process


@dataclass(frozen=True)
class Choice:
    """An engine, "simdgroup" or "tensor", and why it is in use."""

    name: str
    reason: str


def matrix_engine() -> str:
    """The engine of tiled products on the current backend: "simdgroup" or "tensor".

    Raises:
        BackendError: LILY_MLX_MATRIX_ENGINE names none, or one that this device does not have.
    """
    return engine_choice().name


def engine_choice() -> Choice:
    """The engine of tiled products with the reason. The first call on a new device runs a small product there.

    Raises:
        BackendError: as `matrix_engine`.
    """
    if _override is not None:
        return Choice(_override, "asked for by the program")
    return _choice(current_backend(), os.environ.get(ENVIRONMENT, ""))


@contextlib.contextmanager
def use_matrix_engine(name: str) -> Iterator[None]:
    """Uses one engine inside the block, whatever the device, for tests and for launches that are only recorded.

    Raises:
        BackendError: unknown name.
    """
    global _override
    if name not in NAMES:
        raise BackendError(f"matrix engine {name!r} is unknown; choose one of {', '.join(NAMES)}")
    previous, _override = _override, name
    try:
        yield
    finally:
        _override = previous


def refuse_tensor_engine(reason: str) -> bool:
    """Goes back to simdgroup matrices because a kernel fails with the other engine, in later processes too.

    Returns:
        Whether the tensor engine was in use and its choice not forced.
    """
    choice = engine_choice()
    if choice.name != TENSOR or _override is not None or os.environ.get(ENVIRONMENT):
        return False
    global _refused
    _refused = reason
    write_note(_path(), {"failed": reason})
    _choice.cache_clear()
    engine_choice()
    return True


@functools.cache
def _choice(backend: str, requested: str) -> Choice:
    if requested and requested not in NAMES:
        raise BackendError(f"{ENVIRONMENT}={requested}: unknown matrix engine; choose one of {', '.join(NAMES)}")
    if requested == SIMDGROUP:
        return Choice(SIMDGROUP, f"{ENVIRONMENT}={requested}")
    missing = missing_for_tensors(*_device()) if backend == "metal" else ""
    if requested == TENSOR:
        if missing:
            raise BackendError(f"{ENVIRONMENT}={requested}: {missing}; unset {ENVIRONMENT}, or use '{SIMDGROUP}'")
        return Choice(TENSOR, f"{ENVIRONMENT}={requested}")
    if backend != "metal":
        return Choice(SIMDGROUP, f"the {backend} backend's own; {ENVIRONMENT}={TENSOR} tests the other one")
    if missing:
        return Choice(SIMDGROUP, missing)
    failure = _refused or _verdict()
    if failure:
        logger.warning(
            "Metal's tensor operations do not work on this machine, so lily_mlx uses simdgroup matrices instead, which "
            "are slower: %s. Please report it with the output of `lily_mlx doctor`",
            failure.strip().splitlines()[0],
        )
        return Choice(SIMDGROUP, f"tensor operations failed: {failure.strip().splitlines()[0]}")
    return Choice(TENSOR, "the device and the system have tensor operations, and these pass their check")


def missing_for_tensors(architecture: str, system: str) -> str:
    """What a Mac lacks for tensor operations; empty if nothing.

    Args:
        architecture: `mx.device_info()["architecture"]`, e.g. "applegpu_g17s".
        system: the version of macOS, e.g. "26.2".
    """
    found = re.search(r"g(\d+)([a-z]?)$", architecture)
    if found is None:
        return f"the GPU's architecture {architecture or 'unknown'!r} names no generation"
    oldest = 18 if found.group(2) == "p" else 17
    if int(found.group(1)) < oldest:
        return f"tensor operations need GPU generation {oldest}, and {architecture} is {found.group(1)}"
    numbers = [int(number) for number in re.findall(r"\d+", system)[:2]]
    if numbers and numbers[0] == 16:  # how macOS 26 presents itself to programs that were built for older systems
        numbers[0] = 26
    if tuple(numbers) < OLDEST_SYSTEM:
        return f"tensor operations need macOS {'.'.join(map(str, OLDEST_SYSTEM))}, and this is {system or 'unknown'}"
    return ""


def _device() -> tuple[str, str]:
    """The GPU's architecture and the version of macOS; empty where there is no Metal device."""
    if not mx.metal.is_available():
        return "", ""
    return str(mx.device_info().get("architecture", "")), platform.mac_ver()[0]


def _verdict() -> str:
    """What is wrong with tensor operations on this device, from the cache or from a check now; empty if nothing."""
    path = _path()
    known = _read(path)
    if "failed" in known:
        return str(known["failed"])
    if "running" in known and not is_alive(known["running"]):
        failure = ENDED
    else:
        write_note(path, {"running": os.getpid()})
        try:
            failure = check_tensor_engine()
        except BaseException:  # Ctrl-C says nothing about the device
            write_note(path, {})
            raise
    write_note(path, {"failed": failure})
    return failure


def check_tensor_engine() -> str:
    """Multiplies integers with tensor operations on the current backend.

    Returns:
        What went wrong; empty if every product is exact.
    """
    for m, n, k in CHECKED_SHAPES:
        # Sums of at most 64 products of at most 8 * 8, twice: exact in float32.
        a = mx.random.randint(-8, 8, (m, k), key=mx.random.key(m + k))
        b = mx.random.randint(-8, 8, (n, k), key=mx.random.key(n + k + 1))
        try:
            (got,) = check_product(a.astype(mx.bfloat16), b.astype(mx.bfloat16))
            want = 2 * mx.sum(a[:, None, :] * b[None, :, :], axis=2)
            wrong = int(mx.sum(got != want).item())
        except Exception as error:  # of whatever kind: the compiler's, MLX's or the device's
            return f"a product of {m} x {n} x {k}: {type(error).__name__}: {error}"
        if wrong:
            return f"a product of {m} x {n} x {k} has {wrong} wrong elements of {m * n}"
    return ""


def check_product(a: mx.array, b: mx.array) -> list[mx.array]:
    """2 a b^T of bfloat16 [M, K] and [N, K] in one simdgroup, float32 [M, N]."""
    (m, k), n = a.shape, b.shape[0]
    return CHECK(
        [a, b],
        template={"M": m, "N": n, "K": k},
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(m, n)],
        output_dtypes=[mx.float32],
    )


def _path() -> Path:
    """Where the verdict is kept: a file for each device, system, MLX and set of kernel texts."""
    told = [str(mx.device_info().get("device_name", "")), *_device(), version("mlx")]
    told += [CHECK.text.digest, _texts_digest()]
    key = hashlib.sha256("\0".join(told).encode()).hexdigest()[:20]
    return cache_directory() / "verdicts" / f"tensor-{key}.json"


@functools.cache
def _texts_digest() -> str:
    """A hash of all kernel texts: a kernel that was mended may have another try."""
    package = Path(__file__).resolve().parents[1]
    paths = sorted(path for path in package.rglob("*") if path.suffix in (".metal", ".h"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return known if isinstance(known, dict) else {}
    except (OSError, ValueError):
        return {}
