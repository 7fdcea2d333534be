"""The long run: that it notices what grows, and its short form."""

from __future__ import annotations

import dataclasses

import pytest

from tools.soak import ALLOWED, CACHE_BYTES, DISK_BYTES, Sample, grown, main, soak

FLAT = [Sample(50 * i, 6_000_000 + 40 * (i % 3), 29_000_000, 50_000_000, 200_000_000, 5, 9, 0.1) for i in range(20)]


def test_a_flat_run_is_fine():
    assert grown(FLAT) == []


def test_what_fills_in_the_first_quarter_is_fine():
    early = [dataclasses.replace(sample, arrays=100 * i, threads=i) for i, sample in enumerate(FLAT[:5])]
    assert grown(early + FLAT[5:]) == []


@pytest.mark.parametrize("name", ALLOWED)
def test_steady_growth_is_found(name):
    step = ALLOWED[name] / 5 + 0.5
    leaking = [dataclasses.replace(s, **{name: getattr(s, name) + int(step * i)}) for i, s in enumerate(FLAT)]
    (problem,) = grown(leaking)
    assert name in problem


@pytest.mark.parametrize(("name", "budget"), [("cache", CACHE_BYTES), ("disk", DISK_BYTES)])
def test_a_budget_that_is_not_kept_is_found(name, budget):
    (problem,) = grown([*FLAT[:-1], dataclasses.replace(FLAT[-1], **{name: budget + 10**7})])
    assert name in problem


def test_a_short_run(capsys):
    pytest.importorskip("uvicorn")
    done, problems = soak(24, 60, 4, 1, parts=4)
    assert done > 8
    assert [problem for problem in problems if "statuses" in problem or "budget" in problem] == []
    assert "statuses {" in capsys.readouterr().out


def test_the_commands_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "--requests" in capsys.readouterr().out
