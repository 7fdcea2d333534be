"""A tiled product that fails with tensor operations: the engine is given up, and the kernel stays."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import mlx.core as mx
import pytest

from lily_mlx import fallback
from lily_mlx.doctor import machine, selftest
from lily_mlx.doctor.check import Check, Output, Result
from lily_mlx.metal import matrix_engine, use_backend
from lily_mlx.metal import matrix_engines as engine


@pytest.fixture(autouse=True)
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    """A Mac whose tensor operations pass their own check; nothing is known about its kernels."""
    for name in (selftest.ENVIRONMENT, engine.ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(selftest, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(selftest, "_tested", set())
    monkeypatch.setattr(engine, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(engine, "_refused", "")
    monkeypatch.setattr(engine, "_device", lambda: ("applegpu_g17s", "26.2"))
    monkeypatch.setattr(engine, "check_tensor_engine", lambda: "")
    monkeypatch.setattr(mx, "clear_cache", lambda: None)
    engine._choice.cache_clear()
    with use_backend("metal", tracing=True):
        yield
    engine._choice.cache_clear()
    fallback.use([])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "lily_mlx" and r.levelno >= logging.WARNING]


def checks_that_fail(monkeypatch: pytest.MonkeyPatch, function: str, *engines: str) -> list[str]:
    """One check, of a function that is wrong with these engines; the list notes the engines that it ran with."""
    ran: list[str] = []

    def run() -> list[Output]:
        ran.append(matrix_engine())
        return [Output("out", 1.0 if ran[-1] in engines else 0.0, 0.5)]

    monkeypatch.setattr(selftest, "_checks", lambda: [Check(function, "9 rows", run)])
    return ran


@pytest.mark.parametrize("function", selftest.TILED)
def test_the_other_engine_takes_over_with_one_warning(monkeypatch, caplog, function) -> None:
    ran = checks_that_fail(monkeypatch, function, "tensor")
    assert not selftest.replace_failing_kernels()
    assert ran == ["tensor", "simdgroup"]
    assert fallback.active() == ()
    (warning,) = warnings_of(caplog)
    assert "tensor operations do not work" in warning
    assert function in warning
    monkeypatch.setattr(engine, "_refused", "")  # another process reads both verdicts
    engine._choice.cache_clear()
    assert selftest.verdict() == {}
    assert ran == ["tensor", "simdgroup"]


def test_a_kernel_that_fails_with_both_is_replaced(monkeypatch) -> None:
    ran = checks_that_fail(monkeypatch, "moe.grouped_down", "tensor", "simdgroup")
    assert selftest.verdict() == {"moe.grouped_down": "9 rows: out: error 1.0e+00, limit 5e-01"}
    assert ran == ["tensor", "simdgroup"]


def test_a_kernel_without_tiles_says_nothing_about_the_engine(monkeypatch) -> None:
    ran = checks_that_fail(monkeypatch, "linear.rms_norm", "tensor", "simdgroup")
    assert list(selftest.verdict()) == ["linear.rms_norm"]
    assert ran == ["tensor"]
    assert matrix_engine() == "tensor"


def test_a_forced_engine_stays(monkeypatch) -> None:
    monkeypatch.setenv(engine.ENVIRONMENT, "tensor")
    ran = checks_that_fail(monkeypatch, "moe.grouped_down", "tensor")
    assert list(selftest.verdict()) == ["moe.grouped_down"]
    assert ran == ["tensor"]


def test_the_long_form_gives_the_engine_up_as_well() -> None:
    failed = Result("linear.matmul", "9 rows", (), "RuntimeError: no", 0.1)
    selftest.remember([failed])
    assert matrix_engine() == "simdgroup"
    assert not selftest._path().exists()  # nothing is known about the kernels with the other engine


def test_each_engine_has_its_own_verdict(monkeypatch) -> None:
    paths = set()
    for name in engine.NAMES:
        monkeypatch.setenv(engine.ENVIRONMENT, name)
        paths.add(selftest._path())
    assert len(paths) == 2


def test_the_report_names_the_engine_and_the_reason(monkeypatch) -> None:
    assert machine.describe()["matrices"].startswith("tensor (the device and the system")
    monkeypatch.setattr(engine, "_device", lambda: ("applegpu_g16s", "26.2"))
    engine._choice.cache_clear()
    assert "simdgroup (tensor operations need GPU generation 17" in machine.describe()["matrices"]
