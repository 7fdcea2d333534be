"""A check of one kernel function, and what came out of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .inputs import to_float64

BFLOAT16, FLOAT32 = 1e-2, 1e-4


@dataclass(frozen=True)
class Output:
    """max |got - want| / max |want| of one output, and the most that it may be."""

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return bool(self.error <= self.limit)  # NaN never passes


@dataclass(frozen=True)
class Check:
    """One kernel function at one shape.

    Attributes:
        function: its name, `family.function`.
        shape: what it runs on.
        run: makes the inputs without any of our kernels, calls the function and compares with its reference.
    """

    function: str
    shape: str
    run: Callable[[], list[Output]]


@dataclass(frozen=True)
class Result:
    """What a check found.

    Attributes:
        outputs: none where the function raised an error.
        message: the error's words; empty without one.
        seconds: of the whole check, compilation and reference included.
    """

    function: str
    shape: str
    outputs: tuple[Output, ...]
    message: str
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.message and bool(self.outputs) and all(output.passed for output in self.outputs)

    @property
    def reason(self) -> str:
        """Why it failed."""
        if self.message:
            return self.message
        wrong = [o for o in self.outputs if not o.passed]
        return "; ".join(f"{o.name}: error {o.error:.1e}, limit {o.limit:.0e}" for o in wrong)


def run(checks: Iterable[Check]) -> Iterator[Result]:
    """Runs checks one by one. An error of any kind fails its check and no other."""
    for check in checks:
        start = time.monotonic()
        outputs: list[Output] = []
        message = ""
        try:
            outputs = check.run()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        yield Result(check.function, check.shape, tuple(outputs), message, time.monotonic() - start)
        mx.clear_cache()


def close(name: str, got: mx.array, want: np.ndarray, limit: float | None = None) -> Output:
    """Compares a floating-point output; a missing or unwanted NaN and a wrong shape are infinite errors."""
    limit = limit if limit is not None else FLOAT32 if got.dtype == mx.float32 else BFLOAT16
    values = to_float64(got)
    if values.shape != want.shape or not np.all(np.isfinite(values)):
        return Output(name, math.inf, limit)
    scale = max(float(np.abs(want).max(initial=0.0)), 1e-30)
    return Output(name, float(np.abs(values - want).max(initial=0.0)) / scale, limit)


def equal(name: str, got: mx.array | np.ndarray, want: np.ndarray) -> Output:
    """Compares an output that must be right to the last bit."""
    values = to_float64(got) if isinstance(got, mx.array) else got
    return Output(name, 0.0 if np.array_equal(values, want) else math.inf, 0.0)
