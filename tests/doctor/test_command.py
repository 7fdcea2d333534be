"""`lily_mlx doctor`: the report for people and for bug reports, and its exit status."""

from __future__ import annotations

import getpass
import json
import math
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lily_mlx import fallback
from lily_mlx.doctor import buffers, check, command, machine, routes, selftest
from lily_mlx.doctor.buffers import BufferTiming
from lily_mlx.doctor.report import Report
from lily_mlx.doctor.sizes import FULL, SHORT, SMALL
from lily_mlx.doctor.timings import Timing, pairs
from lily_mlx.kernels.moe.policy import tile_height
from lily_mlx.metal import use_backend

from .broken import RAISES, WRONG, break_kernel


@pytest.fixture(autouse=True)
def no_verdict(monkeypatch, tmp_path):
    monkeypatch.setattr(selftest, "cache_directory", lambda: tmp_path)


def test_report_of_a_good_machine(capsys):
    assert command.run(["--no-timings"]) == 0
    printed = capsys.readouterr().out
    assert f"Verdict: all {len(fallback.NAMES)} kernel functions agree" in printed
    assert all(name in printed for name in fallback.NAMES)
    assert "FAILED" not in printed
    assert "not applicable: only MLX's Metal device" in printed


@pytest.mark.parametrize("how", [WRONG, RAISES])
def test_json_of_a_broken_kernel(capsys, monkeypatch, how):
    function = break_kernel(monkeypatch, how)
    assert command.run(["--json", "--quick", "--no-timings"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == [function]
    assert function in found["verdict"]
    failed = [c for c in found["checks"] if not c["passed"]]
    assert {c["function"] for c in failed} == {function}
    assert all(c["message"] or any(not o["passed"] for o in c["outputs"]) for c in failed)
    assert found["machine"]["mlx"]
    assert found["machine"]["backend"] == "cpu"
    text = json.dumps(found)
    assert "somebody" not in text
    assert str(Path.home()) not in text
    assert not re.search(r"(?<!\w)/(?:[\w.-]+/)+", text)


def test_a_path_in_an_error_is_cut_and_its_file_stays():
    told = machine.without_private_words(
        {
            "a": [
                "/Users/Jane Doe/x/lily_mlx/kernels/step.metal:12: error",
                "~/c/d.py",
                "C:\\Users\\me\\x.py",
                "1/2 a/b/c",
            ]
        }
    )
    assert told["a"][1:] == ["d.py", "x.py", "1/2 a/b/c"]
    assert told["a"][0].endswith("step.metal:12: error")


def test_names_of_people_and_hosts_are_cut():
    names = {getpass.getuser(), Path.home().name, socket.gethostname()}
    for name in (n for n in names if len(n) >= 3):
        assert machine.without_private_words(f"file of {name}: bad") == "file of <name>: bad"


def test_the_home_folder_may_hold_blanks(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/Users/Jane Doe"))
    monkeypatch.setattr(machine, "_names", lambda: ("Jane Doe",))
    assert machine.without_private_words("in /Users/Jane Doe/x/y.metal:3") == "in y.metal:3"


def test_infinite_errors_are_valid_json():
    report = Report("small", {}, checks=[check.Result("a.b", "s", (check.Output("out", math.inf, 0.1),), "", 0.0)])
    assert "Infinity" not in json.dumps(report.as_dict())
    assert report.failed == ("a.b",)
    assert "out: error inf" in report.text()


def test_no_checks_are_no_good_verdict():
    assert Report("small", {}).verdict == "nothing was checked"


def test_unknown_backend_status(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.run(["--backend", "abacus"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a machine without Metal")
def test_a_backend_that_is_not_here(capsys):
    assert command.run(["--backend", "metal"]) == 2
    assert "no Metal device" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["lily_mlx.doctor"], ["lily_mlx", "doctor"]], ids=" ".join)
def test_both_commands_exist(words):
    answer = subprocess.run([sys.executable, "-m", *words, "--help"], capture_output=True, text=True, check=False)
    assert answer.returncode == 0
    assert "--json" in answer.stdout


class TestRoutes:
    @pytest.mark.parametrize("backend", ["metal", "cuda", "cpu"])
    def test_every_choice_has_a_reason(self, backend):
        with use_backend(backend, tracing=True):
            found = list(routes.routes(FULL))
        assert all(route.reason and route.choice for route in found)
        assert not any("Args" in route.reason for route in found)
        assert {route.function for route in found} <= set(fallback.NAMES)

    @pytest.mark.parametrize("backend", ["metal", "cuda"])
    def test_each_height_of_a_block_is_checked(self, backend):
        """Of those that chunks of up to 2,048 tokens take."""
        with use_backend(backend, tracing=True):
            heights = [{tile_height(n, FULL.top_k, FULL.experts) for n in rows} for rows in (range(1, 2049), FULL.rows)]
        assert heights[0] == heights[1]

    def test_backends_differ(self):
        chosen = {}
        for backend in ("metal", "cuda"):
            with use_backend(backend, tracing=True):
                chosen[backend] = [route.choice for route in routes.routes(FULL)]
        assert chosen["metal"] != chosen["cuda"]


class TestTimings:
    def test_every_pair_computes_on_both_sides(self):
        import mlx.core as mx

        for pair in pairs(replace(SMALL, rows=(9,), contexts=(120,))):
            ours, theirs = pair.make()
            mx.eval(ours(), theirs())

    def test_table(self):
        report = Report("small", {}, timings=[Timing("a.b", "s", 2.0, 5.0), Timing("a.c", "s", 0, 0, "ValueError: no")])
        assert "2.50 x" in report.text()
        assert "ValueError: no" in report.text()
        assert [t["ratio"] for t in report.as_dict()["timings"]] == [2.5, 0.0]


class TestBuffers:
    def test_only_on_metal(self):
        assert buffers.compare_settings(SMALL) is None

    def test_a_step_can_be_timed(self):
        assert buffers.step_milliseconds(SMALL, steps=4) > 0

    def test_settings_reach_their_own_process(self, monkeypatch):
        """The process is told the setting, and what it prints is read."""
        monkeypatch.setattr(buffers, "current_backend", lambda: "metal")
        seen = []

        def run(command, env, **options):
            seen.append({name: env[name] for name in (buffers.OPS, buffers.MEGABYTES, buffers.CHOICE) if name in env})
            if len(seen) == 2:
                raise subprocess.CalledProcessError(1, command, stderr="Traceback\nRuntimeError: out of memory")
            return subprocess.CompletedProcess(command, 0, stdout="1.5\n")

        monkeypatch.setenv(buffers.OPS, "7")  # the user's own setting is not a comparison
        monkeypatch.setattr(subprocess, "run", run)
        found = buffers.compare_settings(SHORT)
        assert seen == list(buffers.SETTINGS)
        assert [t.milliseconds for t in found] == [1.5, 0.0, *[1.5] * (len(buffers.SETTINGS) - 2)]
        assert found[1].problem == "RuntimeError: out of memory"

    @pytest.mark.slow
    def test_the_process_itself(self):
        environment = {**os.environ, "LILY_MLX_BACKEND": "cpu"}
        answer = subprocess.run(
            [sys.executable, "-m", "lily_mlx.doctor.buffers", "small"],
            capture_output=True, text=True, check=True, env=environment,
        )  # fmt: skip
        assert float(answer.stdout) > 0

    def test_table(self):
        report = Report("small", {}, buffers=[BufferTiming("X=1", 1.25), BufferTiming("X=2", 0.0, "no memory")])
        assert "1.250" in report.text()
        assert "no memory" in report.text()
