"""Test options: `--backend` picks the backend of the kernels, `--slow` adds the long tests."""

from __future__ import annotations

import pytest

from lily_mlx import fallback, metal


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", default="cpu", help="backend of the kernel tests: cpu (default), cuda, metal")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.fixture(autouse=True)
def kernel_backend(request: pytest.FixtureRequest):
    """Runs every test on the chosen backend; kernel tests on `cpu` run in checked mode."""
    name = request.config.getoption("--backend")
    in_kernels = "tests/kernels/" in request.node.nodeid or request.node.get_closest_marker("checked")
    with metal.use_backend(name), metal.checked(name == "cpu" and bool(in_kernels)):
        yield name
    left = fallback.active()
    fallback.use([])
    assert not left, "the test left MLX operations in place of these kernels, for all later tests"
