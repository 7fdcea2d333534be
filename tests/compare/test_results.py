"""The harness refuses: a red gate, drifting rounds, an unknown kind."""

from __future__ import annotations

import json

import pytest

from compare import results
from compare.results import Gate, GateError


def test_a_green_gate_writes_the_schema(tmp_path):
    gate = Gate()
    gate.at_most("error", 0.01, 0.02)
    rows = [{"phase": "decode", "length": 256, "engine": "lily_mlx", "tokens_per_s": 10.0}]
    path = results.write("sweep", rows, seed=3, gate=gate, directory=tmp_path)
    written = json.loads(path.read_text())
    names = ("kind", "date", "commit", "command", "device", "os", "versions", "seed", "gate", "rows")
    assert set(names) <= set(written)
    assert written["rows"] == rows
    assert written["gate"]["green"] is True
    assert {"mlx", "mlx-lm", "lily_mlx"} <= set(written["versions"])
    assert results.read_all(tmp_path) == [written]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (lambda gate: gate.at_most("error", 0.03, 0.02), r"error = 0.03 \(limit 0.02\)"),
        (lambda gate: gate.at_most("error", float("nan"), 0.02), "error = nan"),
        (lambda gate: gate.at_least("agreement", 0.5, 0.9), "agreement = 0.5"),
        (lambda gate: gate.equal("digest", ["a", "b"]), "digest"),
        (lambda gate: gate.equal("digest", []), "digest"),
        (lambda gate: None, "nothing was checked"),
    ],
    ids=["too large", "not a number", "too small", "differing digests", "no digests", "no checks"],
)
@pytest.mark.parametrize("kind", results.TIMED_KINDS)
def test_a_red_gate_writes_no_speed(record, words, kind, tmp_path):
    gate = Gate()
    record(gate)
    with pytest.raises(GateError, match=words):
        results.write(kind, [], seed=0, gate=gate, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_drifting_rounds_are_refused():
    results.require_steady([100.0, 101.0, 99.0], 0.05, "decode")
    with pytest.raises(GateError, match=r"the rounds of decode differ by 18.2% of their median, more than 5%"):
        results.require_steady([100.0, 110.0, 120.0], 0.05, "decode")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind 'poem' is not one of sweep, kernels"):
        results.document("poem", [], seed=0, gate=Gate())


def test_a_table_aligns_numbers_right():
    table = results.table(["engine", "tokens/s"], [["lily_mlx", 1234.5], ["mlx_lm", 2.5]])
    assert table.splitlines() == [
        "| engine   | tokens/s |",
        "|----------|---------:|",
        "| lily_mlx |    1,234 |",
        "| mlx_lm   |     2.50 |",
    ]
