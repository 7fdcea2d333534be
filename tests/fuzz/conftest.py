"""`pytest tests/fuzz --fuzz-minutes 10` searches for so long; without it a few examples run, always the same."""

from __future__ import annotations

import os

import pytest

from . import profile


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-minutes",
        type=float,
        default=0.0,
        help="minutes of random search over all fuzz tests; 0 (default): a few fixed examples each",
    )


def pytest_configure(config: pytest.Config) -> None:
    profile.LONG = minutes(config) > 0


def minutes(config: pytest.Config) -> float:
    """The option, or LILY_MLX_FUZZ_MINUTES where pytest was started above this directory."""
    given = config.getoption("--fuzz-minutes", default=0.0)
    return float(given or os.environ.get("LILY_MLX_FUZZ_MINUTES", 0))


@pytest.fixture
def fuzz_seconds(request: pytest.FixtureRequest) -> float:
    """Seconds for one test: an equal share of all minutes, with every worker of pytest-xdist counted."""
    profile.LONG = minutes(request.config) > 0
    tests = sum("fuzz_seconds" in item.fixturenames for item in request.session.items)
    workers = min(tests, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
    return minutes(request.config) * 60 * workers / tests
