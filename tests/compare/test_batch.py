"""`compare.batch` in its short form, on the bundled checkpoint and the `cpu` backend."""

from __future__ import annotations

import itertools

import pytest

from compare import batch, results
from compare.results import GateError
from lily_mlx.model import batch as batch_model

SHORT = ["--model", "tiny", "--streams", "1", "3", "--context", "130", "--steps", "1", "--rounds", "2"]
SHORT += ["--prefix", "40", "--suffix", "3"]


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(batch, "WARM_UP_STEPS", 1)
    ticks = itertools.count()
    return lambda: float(next(ticks))


def test_writes_streams_and_the_cached_prefix(clock, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LILY_MLX_RESULTS", str(tmp_path))
    batch.main(SHORT, clock)
    (result,) = results.read_all(tmp_path)
    assert (result["kind"], result["gate"]["green"]) == ("batch", True)
    assert [(row["phase"], row["streams"], row["length"]) for row in result["rows"]] == [
        ("decode", 1, 130),
        ("decode", 3, 130),
        ("first token", 1, 40),
    ]
    assert [row["tokens_per_s"] for row in result["rows"][:2]] == [1.0, 3.0]
    assert result["rows"][2]["decode_steps"] == 1.0
    out = capsys.readouterr().out
    assert "tokens/s in all" in out
    assert "first token after 3 new tokens on 40 cached ones" in out


def test_a_wrong_common_step_is_refused(clock, tmp_path, monkeypatch):
    """A step that forgets the residual of its projections must not be timed."""
    monkeypatch.setenv("LILY_MLX_RESULTS", str(tmp_path))
    right = batch_model.matmul
    monkeypatch.setattr(batch_model, "matmul", lambda x, w, residual=None: right(x, w))
    with pytest.raises(GateError, match="3 streams: error of logits"):
        batch.main(SHORT, clock)
    assert list(tmp_path.iterdir()) == []


def test_drifting_rounds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LILY_MLX_RESULTS", str(tmp_path))
    monkeypatch.setattr(batch, "WARM_UP_STEPS", 1)
    squares = (float(n * n) for n in itertools.count())
    with pytest.raises(GateError, match="the rounds of decode with 3 streams differ"):
        batch.main([*SHORT[:3], *SHORT[4:]], lambda: next(squares))
    assert list(tmp_path.iterdir()) == []
