"""The commands in their short forms, on the bundled checkpoint and the `cpu` backend."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from compare import arms, consistency, launches, results, sweep
from compare.results import Gate, GateError

SHORT = ["--model", "tiny", "--lengths", "5", "--steps", "3", "--gate-positions", "24", "--drift", "1000"]


@pytest.fixture
def in_process(monkeypatch):
    """Runs the sweep's arms in this process, which has loaded everything already."""
    loaded: dict[str, arms.Arm] = {}

    def run_arm(engine, phase, lengths, options):
        arm = loaded.setdefault(engine, arms.make_arm(engine, options.model, options.seed))
        rows = []
        for length in lengths:
            tokens = arms.prompt(length, arm.vocab_size)
            run = arm.prefill(tokens, clock) if phase == "prefill" else arm.decode(tokens, options.steps, clock)
            row = {"phase": phase, "length": length, "engine": engine, "backend": "cpu", "peak_memory_bytes": 1}
            rows.append({**row, "seconds": run.seconds, "tokens": run.tokens, "digest": run.digest})
        return rows

    ticks = itertools.count()
    speeds = {"step": 1.0}

    def clock() -> float:
        return next(ticks) * speeds["step"]

    monkeypatch.setattr(sweep, "run_arm", run_arm)
    return speeds


def test_launches_counts_both_engines(capsys):
    launches.main(["--json", "--no-write", "--chunk", "128"])
    measured = json.loads(capsys.readouterr().out)
    ours, theirs = measured["lily_mlx"], measured["mlx_lm"]
    assert ours["decode"]["launches"] == ours["decode"]["stages"] == 253
    assert ours["decode"]["other_ops"] == ours["prefill"]["other_ops"] == 0
    assert theirs["decode"]["launches"] > 1500
    assert theirs["decode"]["stages"] > 800
    least = sum(launches.minimum_bytes(4096).values())
    assert least <= ours["decode"]["bytes"] < 1.03 * least


def test_minimum_bytes_match_the_checkpoint():
    """1.67 GB of weights, 126 MB of state and 20,480 bytes for each token of context."""
    least = launches.minimum_bytes(0)
    assert sum(least.values()) == pytest.approx(1.793e9, rel=1e-3)
    assert launches.minimum_bytes(1)["keys and values"] == 20_480


def test_consistency_is_green_on_the_bundled_checkpoint(capsys):
    consistency.main(["--json", "--no-write", "--positions", "48"])
    figures = json.loads(capsys.readouterr().out)
    assert figures["positions"] == 48
    # Few positions and a bfloat16 baseline: the gate inside compares both with float32.
    assert figures["perplexity_ratio"] == pytest.approx(1, abs=0.05)
    assert figures["top1_agreement"] >= 0.85  # against bfloat16, whose near ties flip


def test_compare_reports_the_gap_where_engines_disagree():
    theirs = np.log(np.array([[0.5, 0.4, 0.1], [0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]))
    ours = theirs.copy()
    ours[0] = np.log([0.4, 0.5, 0.1])
    figures = consistency.compare(ours, theirs, [0, 1, 2])
    assert figures["top1_agreement"] == pytest.approx(2 / 3)
    assert figures["gap_max"] == pytest.approx(np.log(0.5 / 0.4))


def test_sweep_writes_both_engines(in_process, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LILY_MLX_RESULTS", str(tmp_path))
    sweep.main(SHORT)
    (result,) = results.read_all(tmp_path)
    assert {(r["phase"], r["engine"]) for r in result["rows"]} == {
        (phase, engine) for phase in ("prefill", "decode") for engine in ("lily_mlx", "mlx_lm")
    }
    assert all(len(r["rounds"]) == 2 for r in result["rows"])
    assert "ratio to mlx_lm" in capsys.readouterr().out


def test_a_drifting_timer_is_refused(in_process, tmp_path, monkeypatch):
    monkeypatch.setenv("LILY_MLX_RESULTS", str(tmp_path))
    original = sweep.run_arm

    def slower_each_time(*arguments):
        rows = original(*arguments)
        in_process["step"] *= 1.5
        return rows

    monkeypatch.setattr(sweep, "run_arm", slower_each_time)
    with pytest.raises(GateError, match=r"the rounds of .* differ by"):
        sweep.main([*SHORT[:-1], "0.1", "--phases", "prefill"])
    assert list(tmp_path.iterdir()) == []


def test_only_the_rows_that_drift_are_left_out():
    def rounds(length, *seconds):
        row = {"phase": "decode", "length": length, "engine": "lily_mlx", "tokens": 64, "digest": "d", "backend": "cpu"}
        return [{**row, "seconds": s, "peak_memory_bytes": 1} for s in seconds]

    gate = Gate()
    rows, refused = sweep.summarise([*rounds(256, 1.0, 1.01), *rounds(512, 1.0, 2.0)], gate, 0.1)
    assert [row["length"] for row in rows] == [256]
    assert len(refused) == 1
    assert "lily_mlx decode at 512" in refused[0]
    assert gate.is_green
    sweep.summarise([*rounds(256, 1.0), {**rounds(256, 1.0)[0], "digest": "other"}], gate, 0.1)
    assert not gate.is_green


def test_a_wrong_kernel_is_refused(in_process, tmp_path, monkeypatch):
    """A decode that forgets the residual of one projection must not be timed."""
    from lily_mlx.model import prefill

    monkeypatch.setenv("LILY_MLX_RESULTS", str(tmp_path))
    right = prefill.matmul
    monkeypatch.setattr(prefill, "matmul", lambda x, w, residual=None, **k: right(x, w, None, **k))
    with pytest.raises(GateError, match="root mean square error of logits"):
        sweep.main(SHORT)
    assert list(tmp_path.iterdir()) == []


def test_the_prompt_follows_the_contract():
    assert arms.prompt(4, 248_320) == [0, 2654435761 % 248_320, 1013904226 % 248_320, 3668339987 % 248_320]


def test_arms_alternate():
    assert sweep.order(["a", "b"], 4) == ["a", "b", "b", "a", "a", "b", "b", "a"]
