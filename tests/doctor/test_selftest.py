"""The engine's short form: failing kernels are replaced once, with one warning, and the verdict is kept."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from lily_mlx import fallback
from lily_mlx.checkpoints import bundled_checkpoint
from lily_mlx.doctor import check, machine, selftest
from lily_mlx.doctor.checks import all_checks
from lily_mlx.doctor.sizes import SMALL
from lily_mlx.engine import Engine, generate_tokens, make_sampling
from lily_mlx.metal import CompileError
from lily_mlx.model import Model
from tests.support import to_numpy

from .broken import NO_COMPILE, RAISES, WRONG, break_kernel

GREEDY = make_sampling()
PROMPT = [7, 300, 45, 2, 900, 33, 8, 120, 61, 5]


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No verdict is known, the test is asked for, and afterwards every kernel is back."""
    monkeypatch.setenv(selftest.ENVIRONMENT, "1")
    monkeypatch.setattr(selftest, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(selftest, "_tested", set())
    yield
    fallback.use([])


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(bundled_checkpoint())


@pytest.fixture
def few_checks(monkeypatch):
    """Only the checks that the broken kernels fail, and one that passes."""
    names = ("linear.project_add", "linear.norm_project", "moe.combine_norm", "linear.rms_norm")
    monkeypatch.setattr(selftest, "_checks", lambda: [c for c in all_checks(SMALL) if c.function in names])


def generate(engine: Engine, count: int = 16):
    """Greedy tokens and the logits that they were chosen from."""
    return [(token, to_numpy(logits)[0]) for token, logits in generate_tokens(engine, PROMPT, GREEDY, max_tokens=count)]


@pytest.fixture(scope="module")
def text(model):
    """What the unbroken engine generates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(selftest.ENVIRONMENT, "0")
        return generate(Engine(model))


def assert_same_text(got, want) -> None:
    """Equal tokens up to the first near tie, after which texts may go apart."""
    for position, ((token, logits), (wanted, _)) in enumerate(zip(got, want, strict=True)):
        if token != wanted:
            gap = (logits[token] - logits[wanted]) / (logits.max() - logits.min())
            assert gap < 1e-2, f"token {position} is {token}, not {wanted}, and that by {gap:.1%} of the range"
            assert position >= 4, "the texts go apart too soon to say anything"
            return


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "lily_mlx" and r.levelno >= logging.WARNING]


@pytest.mark.parametrize("how", [WRONG, NO_COMPILE, RAISES])
def test_a_broken_kernel_is_replaced_with_one_warning(model, text, few_checks, monkeypatch, caplog, how):
    function = break_kernel(monkeypatch, how)
    for _ in range(3):
        engine = Engine(model)
        assert_same_text(generate(engine), text)
    (warning,) = warnings_of(caplog)
    assert function in warning
    assert "lily_mlx doctor" in warning
    assert fallback.active() == (function,)


def test_a_wrong_kernel_changes_the_text_without_the_short_form(model, text, monkeypatch, caplog):
    """Otherwise the tests above would show nothing."""
    monkeypatch.setenv(selftest.ENVIRONMENT, "0")
    break_kernel(monkeypatch, WRONG)
    got = generate(Engine(model))
    assert [token for token, _ in got] != [token for token, _ in text]
    assert not warnings_of(caplog)


def test_a_kernel_that_does_not_compile_ends_the_generation_without_the_short_form(model, monkeypatch):
    monkeypatch.setenv(selftest.ENVIRONMENT, "0")
    break_kernel(monkeypatch, NO_COMPILE)
    with pytest.raises(CompileError, match="moe_combine_norm"):
        generate(Engine(model))


def test_several_kernels_and_one_warning(model, text, few_checks, monkeypatch, caplog):
    names = {break_kernel(monkeypatch, how) for how in (WRONG, NO_COMPILE, RAISES)}
    assert_same_text(generate(Engine(model)), text)
    (warning,) = warnings_of(caplog)
    assert all(name in warning for name in names)
    assert set(fallback.active()) == names


def test_all_kernels_work_here(model, caplog):
    Engine(model)
    assert fallback.active() == ()
    assert not warnings_of(caplog)


def test_every_function_is_checked():
    assert {c.function for c in all_checks(SMALL)} == set(fallback.NAMES)


class TestCache:
    def test_the_verdict_is_read_by_the_next_process(self, model, few_checks, monkeypatch, caplog):
        function = break_kernel(monkeypatch, RAISES)
        Engine(model)
        fallback.use([])
        monkeypatch.setattr(selftest, "_tested", set())
        monkeypatch.setattr(selftest, "_checks", lambda: pytest.fail("the checks ran again"))
        Engine(model)
        assert fallback.active() == (function,)
        assert len(warnings_of(caplog)) == 2  # one for each process

    def test_another_version_runs_again(self, few_checks, monkeypatch):
        first = selftest._path()
        assert selftest.verdict() == {}
        monkeypatch.setattr(machine, "source_digest", lambda: "other")
        assert selftest._path() != first
        assert not selftest._path().exists()

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"failed": 3}', '{"failed": {"no.kernel": "x"}}'])
    def test_a_broken_file_is_no_verdict_of_failure(self, few_checks, content):
        path = selftest._path()
        path.parent.mkdir(parents=True)
        path.write_text(content)
        assert selftest.verdict() == {}

    def test_a_directory_that_cannot_be_written(self, few_checks, monkeypatch, tmp_path):
        file = tmp_path / "file"
        file.write_text("")
        monkeypatch.setattr(selftest, "cache_directory", lambda: file)
        assert selftest.verdict() == {}

    def test_the_long_form_replaces_the_verdict(self, few_checks):
        failed = check.Result("moe.route", "9 rows", (), "RuntimeError: no", 0.1)
        selftest.remember([failed])
        assert selftest.verdict() == {"moe.route": "9 rows: RuntimeError: no"}

    def test_a_check_that_ends_the_process_is_not_tried_again(self, few_checks, tmp_path):
        """The note that a process leaves when a check takes it down with it."""
        journal = selftest._path().with_suffix(".running")
        code = (
            "import os, pathlib, sys; from lily_mlx.doctor import check, selftest\n"
            "one = check.Check('linear.rms_norm', '', lambda: os._exit(9))\n"
            "selftest._run([one], pathlib.Path(sys.argv[1]))"
        )
        answer = subprocess.run([sys.executable, "-c", code, str(journal)], check=False)
        assert answer.returncode == 9
        assert json.loads(journal.read_text())["running"] == "linear.rms_norm"
        assert selftest.verdict() == {"linear.rms_norm": selftest.ENDED}
        assert not journal.exists()

    def test_ctrl_c_says_nothing_about_a_kernel(self, few_checks):
        journal = selftest._path().with_suffix(".running")

        def interrupted():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            selftest._run([selftest.Check("linear.rms_norm", "", interrupted)], journal)
        noted = json.loads(journal.read_text())
        assert (noted["running"], noted["failed"]) == (None, {})
        journal.write_text(json.dumps({**noted, "process": 2**22 + 1, "failed": {"linear.matmul": selftest.ENDED}}))
        assert selftest._ended_in(journal) == {"linear.matmul": selftest.ENDED}

    def test_the_note_of_a_process_that_still_runs_says_nothing(self, few_checks):
        journal = selftest._path().with_suffix(".running")
        journal.parent.mkdir(parents=True)
        journal.write_text(json.dumps({"process": os.getpid(), "running": "linear.rms_norm", "failed": {}}))
        assert selftest.verdict() == {}


@pytest.mark.parametrize(
    ("given", "backend", "wanted"),
    [
        (None, "cpu", False),
        (None, "metal", True),
        (None, "cuda", False),
        ("", "cpu", False),
        ("1", "cpu", True),
        ("0", "metal", False),
    ],
)
def test_where_it_runs(monkeypatch, given, backend, wanted):
    if given is None:
        monkeypatch.delenv(selftest.ENVIRONMENT)
    else:
        monkeypatch.setenv(selftest.ENVIRONMENT, given)
    assert selftest.is_wanted(backend) is wanted
