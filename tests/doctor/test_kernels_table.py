"""docs/kernels.md is what the kernels, the graph and the recorded evidence give."""

from __future__ import annotations

import json
import re

import pytest

from lily_mlx.doctor.sizes import FULL, SHORT, SMALL
from lily_mlx.kernels.attention import capacity_for, policy
from tools import kernel_evidence, kernels_table


@pytest.fixture(scope="module")
def kernels():
    return {name: kernel for name, (_, kernel) in kernels_table.all_kernels().items()}


@pytest.fixture(scope="module")
def rows():
    return kernels_table.rows()


def test_the_page_is_up_to_date():
    assert kernels_table.main(["--check"]) == 0, "run python -m tools.kernels_table"


def test_check_notices_a_stale_page(tmp_path, capsys):
    stale = tmp_path / "kernels.md"
    assert kernels_table.main(["--check", "--page", str(stale)]) == 1
    stale.write_text("old")
    assert kernels_table.main(["--check", "--page", str(stale)]) == 1
    assert stale.read_text() == "old"
    assert "out of date" in capsys.readouterr().err
    assert kernels_table.main(["--page", str(stale)]) == 0
    assert kernels_table.main(["--check", "--page", str(stale)]) == 0


def test_every_kernel_file_is_a_row(rows):
    files = {path.resolve() for path in (kernels_table.PACKAGE / "kernels").rglob("*.metal")}
    assert {kernels_table._body(row.kernel).resolve() for row in rows} == files


def test_every_row_says_what_it_does_and_replaces(rows):
    names = {row.kernel.name for row in rows}
    assert names == set(kernels_table.REPLACES)
    assert set(kernels_table.WHEN) == {row.kernel.name for row in rows if row.step is None and row.chunk is None}
    for row in rows:
        assert len(row.computes) > 20, row
        assert "\n" not in row.computes


def test_launches_are_those_of_the_whole_graph(rows):
    """No launch is lost between the graph and the table."""
    graph = kernels_table.decode_graph(kernels_table.CONTEXT)
    assert sum(row.step[0] for row in rows if row.step) == len(graph.launches)


def test_small_checks_launch_every_kernel(kernels):
    found = set()
    for result, names in kernel_evidence.checked_kernels(SMALL):
        assert result.passed, result
        found |= names
    assert found == set(kernels)


@pytest.mark.parametrize("sizes", [SHORT, FULL, SMALL], ids=lambda s: s.label)
@pytest.mark.parametrize("wide", [False, True], ids=["8-rows", "16-rows"])
def test_every_form_has_both_routes_of_prefill_attention(sizes, wide):
    plans = {
        policy.prefill_plan(
            rows * sizes.attention.group, sizes.attention.kv_heads, capacity_for(rows + context), wide
        ).part_keys
        is None
        for rows in sizes.rows
        for context in sizes.contexts
    }
    assert plans == {True, False}
    blocks = {(context + rows) // 128 == context // 128 for rows in sizes.rows for context in sizes.contexts}
    assert blocks == {True, False}


class TestEvidence:
    def entry(self, kernel, **changes):
        return {
            "cuda": {
                "date": "2026-01-02",
                "device": "a GPU",
                "mlx": "1.2",
                "command": "a command",
                "kernels": {kernel.name: {"result": "3 checks passed", "digest": kernel.text.digest, **changes}},
            }
        }

    def test_a_result_belongs_to_its_text(self, kernels):
        kernel = kernels["matmul"]
        assert kernel_evidence.shown(self.entry(kernel), "cuda", kernel) == "3 checks passed"
        old = kernel_evidence.shown(self.entry(kernel, digest="other"), "cuda", kernel)
        assert old == "3 checks passed (of an earlier text)"

    def test_what_is_absent_is_not_invented(self, kernels, rows):
        text = kernels_table.page(rows, {})
        evidence = text[text.index("## Evidence") :]
        for row in re.findall(r"^\| `.*", evidence, re.MULTILINE):
            cells = [cell.strip() for cell in row.strip("|").split("|")[1:]]
            assert cells == ["not recorded"] * 4 + ["not yet run"]

    def test_merging_a_file_of_another_machine(self, kernels, tmp_path, rows):
        other, kept, page = (tmp_path / name for name in ("other.json", "kept.json", "page.md"))
        kernel_evidence.write(other, self.entry(kernels["matmul"]))
        arguments = ["--evidence", str(kept), "--page", str(page)]
        assert kernels_table.main([*arguments, "--merge", str(other)]) == 0
        assert json.loads(kept.read_text()) == json.loads(other.read_text())
        assert "a GPU, MLX 1.2: `a command`" in page.read_text()

    def test_unknown_kinds(self, tmp_path):
        path = tmp_path / "evidence.json"
        path.write_text('{"hearsay": {}}')
        with pytest.raises(ValueError, match="hearsay"):
            kernel_evidence.read(path)

    def test_a_failing_check_is_recorded_as_that(self, kernels, monkeypatch):
        from .broken import WRONG, break_kernel

        few = [c for c in kernel_evidence.all_checks(SMALL) if c.function in ("linear.project_add", "linear.rms_norm")]
        monkeypatch.setattr(kernel_evidence, "all_checks", lambda sizes: few)
        break_kernel(monkeypatch, WRONG)
        backend, found = kernel_evidence.record_checks(kernels)
        results = {name: entry["result"] for name, entry in found["kernels"].items()}
        assert (backend, results) == (
            "cpu",
            {"project_add": "1 of 1 checks fail", "rms_norm": f"{len(SMALL.rows)} checks passed"},
        )
