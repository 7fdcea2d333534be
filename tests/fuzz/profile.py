"""How long the fuzz tests search, and what every one of them draws.

Every new template value of a kernel is a run of the C++ compiler, so the normal test run draws those from short
lists and makes a few examples, the same each time. The long profile draws from long lists and goes on for its share
of the minutes, with new seeds:

    pytest tests/fuzz --fuzz-minutes 10          or, from anywhere: LILY_MLX_FUZZ_MINUTES=10 pytest

A failure prints the smallest example that hypothesis found; `--hypothesis-seed` is not needed to repeat it, its
values are the arguments of the test's function.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.support import relative_error, to_numpy

LONG = False
_BATCH = 100  # examples from one seed

BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_COLUMNS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 544, 608, 640, 1056, 2048, 2080, 2176)
_SHORT_FORMATS = ((3, 32, 96), (4, 64, 64), (8, 128, 384))
_LONG_FORMATS = tuple((b, g, c) for b in BITS for g in GROUPS for c in _COLUMNS if c % g == 0)


def fuzz(examples: int, **strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test from a function that checks one drawn example.

    Args:
        examples: examples of the short profile.
        strategies: one for each argument of the function.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def test(fuzz_seconds: float) -> None:
            common: dict[str, Any] = {
                "deadline": None,
                "database": None,
                "suppress_health_check": list(HealthCheck),
            }
            if not LONG:
                settings(max_examples=examples, derandomize=True, **common)(given(**strategies)(check))()
                return
            end, tried, failed = time.monotonic() + fuzz_seconds, 0, False

            def check_in_time(**arguments: Any) -> None:
                nonlocal tried, failed
                if time.monotonic() > end and not failed:  # what failed once is made smaller even after the end
                    return
                tried += 1
                try:
                    check(**arguments)
                except BaseException:
                    failed = True
                    raise

            check_in_time.__name__ = check.__name__
            while time.monotonic() < end:
                chosen = random.SystemRandom().randrange(2**32)
                print(f"seed {chosen}")
                seed(chosen)(settings(max_examples=_BATCH, **common)(given(**strategies)(check_in_time)))()
            print(f"{tried} examples")

        test.__name__ = check.__name__
        test.__doc__ = check.__doc__
        test.__module__ = check.__module__
        return test

    return decorate


def choice(short: Sequence[Any], long: Sequence[Any]) -> st.SearchStrategy[Any]:
    """One of a few values in the short profile, of many in the long one; for what decides a kernel's text."""
    return st.deferred(lambda: st.sampled_from(long if LONG else short))


def formats() -> st.SearchStrategy[tuple[int, int, int]]:
    """(bits, group size, columns) of a quantised weight."""
    return choice(_SHORT_FORMATS, _LONG_FORMATS)


def seeds() -> st.SearchStrategy[int]:
    """Seeds of the values of arrays, which are too many to be drawn one by one."""
    return st.integers(0, 2**32 - 1)


def offsets() -> st.SearchStrategy[int]:
    """Rows in front of an array in the buffer that it is a view of."""
    return st.sampled_from((0, 0, 1, 3))


def scales() -> st.SearchStrategy[float]:
    """Sizes of activations: those of a model, and far away from them."""
    return st.sampled_from((1.0, 1e-3, 30.0))


def placed(array: mx.array, rows: int) -> mx.array:
    """The same values as a view that starts so many rows inside a larger buffer; the rows before it are NaN."""
    if rows == 0:
        return array
    filler = mx.full((rows, *array.shape[1:]), float("nan") if mx.issubdtype(array.dtype, mx.floating) else 7)
    return mx.concatenate([filler.astype(array.dtype), array])[rows:]


def assert_near(name: str, got: mx.array, want: np.ndarray, relative: float, size: float = 0.0) -> None:
    """Fails unless max |got - want| <= relative * max(max |want|, size).

    Args:
        size: the size that a result has before terms of it cancel, where few results could all be near zero.
    """
    error = relative_error(to_numpy(got), want)
    largest = float(np.nanmax(np.abs(want), initial=1e-30))
    limit = relative * max(1.0, size / largest)
    assert error <= limit, f"{name}: relative error {error:.3e} exceeds {limit:.1e}"


def product_size(x: np.ndarray, dense: np.ndarray) -> float:
    """The usual size of the entries of x @ dense.T for values of random signs."""
    return float(np.sqrt((x * x) @ (dense * dense).T).max())
