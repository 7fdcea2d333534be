"""Which backend runs a kernel: `metal`, `cuda` or `cpu`.

The choice is an argument (`use_backend`), else the environment variable LILY_MLX_BACKEND, else the
device: Apple GPU, NVIDIA GPU, or the CPU where MLX has no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator

import mlx.core as mx

from .errors import BackendError
from .launch import Launch

NAMES = ("metal", "cuda", "cpu")
ENVIRONMENT = "LILY_MLX_BACKEND"
CHECKED_ENVIRONMENT = "LILY_MLX_CHECKED"

_override: str | None = None
_checked: bool | None = None


def current_backend() -> str:
    """The name of the backend that runs kernels now.

    Raises:
        BackendError: LILY_MLX_BACKEND names none, or one that this machine cannot run.
    """
    if _override is not None:
        return _override
    requested = os.environ.get(ENVIRONMENT)
    if requested:
        return require_backend(requested, f"{ENVIRONMENT}={requested}")
    return _device_backend()


def require_backend(name: str, origin: str | None = None) -> str:
    """Checks that a backend exists and that this machine can run it; returns its name."""
    origin = origin or f"backend {name!r}"
    if name not in NAMES:
        raise BackendError(f"{origin}: unknown backend {name!r}; choose one of {', '.join(NAMES)}")
    if name == "metal" and not mx.metal.is_available():
        raise BackendError(f"{origin}: MLX has no Metal device here; use 'cpu', or run on Apple silicon")
    if name == "cuda" and not mx.cuda.is_available():
        raise BackendError(
            f"{origin}: MLX has no CUDA device here; install lily_mlx[cuda13] (or [cuda12]) on a machine with an NVIDIA GPU, "
            "or use 'cpu'"
        )
    return name


@functools.cache
def _device_backend() -> str:
    if mx.metal.is_available():
        return "metal"
    if mx.cuda.is_available():
        return "cuda"
    return "cpu"


@contextlib.contextmanager
def use_backend(name: str, *, tracing: bool = False) -> Iterator[None]:
    """Runs the kernels launched inside the block on one backend, whatever the thread.

    Args:
        name: "metal", "cuda" or "cpu".
        tracing: accept a backend whose device is absent, because the launches are only recorded by
            `mx.export_function`.

    Raises:
        BackendError: unknown name, or no such device here.
    """
    global _override
    if not tracing or name not in NAMES:
        require_backend(name)
    previous, _override = _override, name
    try:
        yield
    finally:
        _override = previous


def is_checked() -> bool:
    """Whether the `cpu` backend runs in checked mode (LILY_MLX_CHECKED=1 or `checked()`)."""
    if _checked is not None:
        return _checked
    return os.environ.get(CHECKED_ENVIRONMENT, "0") not in ("", "0")


@contextlib.contextmanager
def checked(on: bool = True) -> Iterator[None]:
    """Switches the `cpu` backend's checked mode on or off inside the block."""
    global _checked
    previous, _checked = _checked, on
    try:
        yield
    finally:
        _checked = previous


@functools.cache
def launcher(name: str) -> Callable[[Launch], list[mx.array]]:
    """The function that launches kernels on a backend. Backends are imported when first used."""
    launch: Callable[[Launch], list[mx.array]]
    launch = importlib.import_module(f"{__package__}.{name}_backend").launch
    return launch
