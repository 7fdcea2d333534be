"""The choice between simdgroup matrices and tensor operations, and the product that decides about the latter."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from lily_mlx.metal import BackendError, Kernel, LaunchError, matrix_engine, use_backend, use_matrix_engine
from lily_mlx.metal import matrix_engines as engine
from tests.support import bf16, need_tensor_operations, rng, to_numpy

M5, M4 = "applegpu_g17s", "applegpu_g16s"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No verdict is known, nothing is forced, and afterwards nothing is left."""
    monkeypatch.delenv(engine.ENVIRONMENT, raising=False)
    monkeypatch.setattr(engine, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(engine, "_refused", "")
    engine._choice.cache_clear()
    yield
    engine._choice.cache_clear()


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A Mac that has tensor operations; the list takes what the next checks find."""
    found: list[str] = []
    monkeypatch.setattr(engine, "_device", lambda: (M5, "26.2"))
    monkeypatch.setattr(engine, "check_tensor_engine", lambda: found.pop(0))
    with use_backend("metal", tracing=True):
        yield found


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "lily_mlx" and r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("architecture", "system", "missing"),
    [
        (M5, "26.2", ""),
        (M5, "26.3.1", ""),
        (M5, "27.0", ""),
        (M5, "16.2", ""),
        ("applegpu_g18p", "26.2", ""),
        ("applegpu_g17d", "26.2", ""),
        (M4, "26.2", "need GPU generation 17, and applegpu_g16s is 16"),
        ("applegpu_g17p", "26.2", "need GPU generation 18"),
        ("applegpu_g9x", "27.0", "need GPU generation 17"),
        (M5, "26.1", "need macOS 26.2, and this is 26.1"),
        (M5, "16.1", "need macOS 26.2"),
        (M5, "15.7", "need macOS 26.2"),
        (M5, "26", "need macOS 26.2"),
        (M5, "", "this is unknown"),
        ("", "26.2", "'unknown' names no generation"),
        ("NVIDIA", "26.2", "names no generation"),
    ],
)
def test_what_a_mac_needs(architecture: str, system: str, missing: str) -> None:
    told = engine.missing_for_tensors(architecture, system)
    assert (told == "") == (missing == "")
    assert missing in told


def test_a_mac_that_has_tensor_operations_uses_them(mac: list[str], caplog: pytest.LogCaptureFixture) -> None:
    mac.append("")
    assert matrix_engine() == "tensor"
    assert "pass their check" in engine.engine_choice().reason
    assert not warnings_of(caplog)


@pytest.mark.parametrize(("device", "word"), [((M4, "26.2"), "generation"), ((M5, "26.1"), "macOS"), (("", ""), "GPU")])
def test_a_mac_without_them_is_not_asked(mac: list[str], monkeypatch, caplog, device, word: str) -> None:
    monkeypatch.setattr(engine, "_device", lambda: device)  # mac is empty: a check would be an error
    assert matrix_engine() == "simdgroup"
    assert word in engine.engine_choice().reason
    assert not warnings_of(caplog)


def test_a_failing_check_leaves_simdgroup_matrices_with_one_warning(mac: list[str], caplog) -> None:
    mac.append("a product of 32 x 32 x 64 has 7 wrong elements of 1024")
    assert [matrix_engine() for _ in range(3)] == ["simdgroup"] * 3
    (warning,) = warnings_of(caplog)
    assert "7 wrong elements" in warning
    assert "7 wrong elements" in engine.engine_choice().reason


@pytest.mark.parametrize(("found", "name"), [("", "tensor"), ("wrong", "simdgroup")])
def test_the_verdict_is_kept_for_later_processes(mac: list[str], found: str, name: str) -> None:
    mac.append(found)
    assert matrix_engine() == name
    engine._choice.cache_clear()
    assert matrix_engine() == name  # without another check, of which there is none


@pytest.mark.parametrize("change", ["device", "text"])
def test_another_device_or_text_is_checked_again(mac: list[str], monkeypatch, change: str) -> None:
    mac += ["", "wrong"]
    assert matrix_engine() == "tensor"
    if change == "device":
        monkeypatch.setattr(engine, "_device", lambda: (M5, "26.3"))
    else:
        monkeypatch.setattr(engine, "CHECK", broken("a + b"))
    engine._choice.cache_clear()
    assert matrix_engine() == "simdgroup"


def test_a_check_that_ended_its_process_is_not_tried_again(mac: list[str]) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    engine.write_note(engine._path(), {"running": int(ended.stdout)})
    assert matrix_engine() == "simdgroup"
    assert engine.ENDED in engine.engine_choice().reason


def test_a_check_that_still_runs_elsewhere_says_nothing(mac: list[str]) -> None:
    engine.write_note(engine._path(), {"running": os.getpid()})
    mac.append("")
    assert matrix_engine() == "tensor"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"other": 1}'])
def test_a_broken_file_is_no_verdict(mac: list[str], content: str) -> None:
    engine._path().parent.mkdir(parents=True)
    engine._path().write_text(content)
    mac.append("")
    assert matrix_engine() == "tensor"
    assert json.loads(engine._path().read_text()) == {"failed": ""}


def test_a_directory_that_cannot_be_written(mac: list[str], monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(engine, "cache_directory", lambda: tmp_path / "file")
    mac.append("")
    assert matrix_engine() == "tensor"
    assert engine.refuse_tensor_engine("moe.grouped_down: wrong")
    assert matrix_engine() == "simdgroup"


def test_a_kernel_that_fails_ends_the_use_of_tensor_operations(mac: list[str], monkeypatch, caplog) -> None:
    mac.append("")
    assert matrix_engine() == "tensor"
    assert engine.refuse_tensor_engine("moe.grouped_down: wrong")
    assert matrix_engine() == "simdgroup"
    assert not engine.refuse_tensor_engine("again")
    (warning,) = warnings_of(caplog)
    assert "moe.grouped_down: wrong" in warning
    monkeypatch.setattr(engine, "_refused", "")  # another process
    engine._choice.cache_clear()
    assert matrix_engine() == "simdgroup"


def test_ctrl_c_says_nothing_about_tensor_operations(mac: list[str], monkeypatch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "check_tensor_engine", interrupted)
        with pytest.raises(KeyboardInterrupt):
            matrix_engine()
    mac.append("")
    assert matrix_engine() == "tensor"


def test_mended_kernels_have_another_try(mac: list[str], monkeypatch) -> None:
    mac.append("")
    assert matrix_engine() == "tensor"
    assert engine.refuse_tensor_engine("moe.grouped_down: wrong")
    monkeypatch.setattr(engine, "_refused", "")  # another process, with other texts
    monkeypatch.setattr(engine, "_texts_digest", lambda: "other")
    engine._choice.cache_clear()
    mac.append("")
    assert matrix_engine() == "tensor"


@pytest.mark.parametrize("backend", ["cpu", "cuda", "metal"])
def test_other_backends_use_tensor_operations_only_if_told(monkeypatch, backend: str) -> None:
    monkeypatch.setattr(engine, "_device", lambda: ("", ""))
    with use_backend(backend, tracing=True):
        assert matrix_engine() == "simdgroup"
        monkeypatch.setenv(engine.ENVIRONMENT, "tensor")
        if backend == "metal":
            with pytest.raises(BackendError, match=r"LILY_MLX_MATRIX_ENGINE=tensor: .*; unset"):
                matrix_engine()
        else:
            assert matrix_engine() == "tensor"
        monkeypatch.setenv(engine.ENVIRONMENT, "simdgroup")
        assert matrix_engine() == "simdgroup"


@pytest.mark.parametrize("device", [(M4, "26.2"), (M5, "26.1")], ids=str)
def test_tensor_operations_cannot_be_forced_where_they_are_not(mac: list[str], monkeypatch, device) -> None:
    monkeypatch.setattr(engine, "_device", lambda: device)
    monkeypatch.setenv(engine.ENVIRONMENT, "tensor")
    with pytest.raises(BackendError, match="tensor operations need"):
        matrix_engine()


@pytest.mark.parametrize("name", ["tensor", "simdgroup"])
def test_a_forced_engine_is_not_checked_or_refused(mac: list[str], monkeypatch, name: str) -> None:
    monkeypatch.setenv(engine.ENVIRONMENT, name)  # mac is empty: a check would be an error
    assert matrix_engine() == name
    assert not engine.refuse_tensor_engine("moe.grouped_down: wrong")
    assert matrix_engine() == name


@pytest.mark.parametrize("name", ["nax", "Tensor", "tensor "])
def test_unknown_names_are_errors(monkeypatch, name: str) -> None:
    monkeypatch.setenv(engine.ENVIRONMENT, name)
    with pytest.raises(BackendError, match="choose one of simdgroup, tensor"):
        matrix_engine()
    with pytest.raises(BackendError, match="choose one of simdgroup, tensor"), use_matrix_engine(name):
        pass


def test_a_block_of_the_program_decides(monkeypatch) -> None:
    monkeypatch.setenv(engine.ENVIRONMENT, "simdgroup")
    with use_matrix_engine("tensor"):
        assert matrix_engine() == "tensor"
        assert not engine.refuse_tensor_engine("moe.grouped_down: wrong")
    assert matrix_engine() == "simdgroup"


def broken(expression: str) -> Kernel:
    source = f"out[thread_position_in_grid.x] = {expression};"
    return Kernel.from_source("broken", ("a", "b"), ("out",), source)


@pytest.mark.checked
def test_the_check_passes() -> None:
    need_tensor_operations()
    assert engine.check_tensor_engine() == ""


@pytest.mark.parametrize(
    ("expression", "reason"), [("1.5f", "wrong elements of 1024"), ("nothing", "32 x 32 x 64: CompileError")]
)
def test_the_check_finds(monkeypatch, expression: str, reason: str) -> None:
    monkeypatch.setattr(engine, "CHECK", broken(expression))
    assert reason in engine.check_tensor_engine()


@pytest.mark.checked
@pytest.mark.parametrize(("m", "n", "k"), [(8, 32, 16), (16, 8, 48)], ids=str)
def test_products_of_other_sizes(m: int, n: int, k: int) -> None:
    need_tensor_operations()
    generator = rng(m + n)
    a, b = (bf16(generator.integers(-9, 10, (rows, k))) for rows in (m, n))
    (got,) = engine.check_product(a, b)
    assert (to_numpy(got) == 2 * to_numpy(a) @ to_numpy(b).T).all()


@pytest.mark.checked
def test_operands_that_nobody_wrote_are_found() -> None:
    """The CPU's tensor operations read both operands under its checks."""
    if engine.current_backend() != "cpu":
        pytest.skip("only the cpu backend has checks")
    path = Path(engine.__file__).parent
    source = (path / "tensor_check.metal").read_text().replace("i < N * K;", "i < N * K - 32;")
    header = (path / "include/tensor_engine.h").read_text()
    kernel = Kernel.from_source("unwritten", ("a", "b"), ("out",), source, header)
    with pytest.raises(
        LaunchError, match=r"reads threadgroup array b_pieces\[\d+\], which nobody has written\n.*unwritten"
    ):
        kernel(
            [mx.ones((16, 16), mx.bfloat16)] * 2,
            template={"M": 16, "N": 16, "K": 16},
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(16, 16)],
            output_dtypes=[mx.float32],
        )
