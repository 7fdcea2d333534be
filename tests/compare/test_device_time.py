"""Device times from the events of a profiler: what counts, and what is refused."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from compare import device_time, kernels
from compare.timing import SLOW_SECONDS, Arm

MARK = "custom_kernel_lily_between_rounds_0123"


def event(name: str, start: float, duration: float, category: str = "kernel") -> dict:
    return {"name": name, "ts": start, "dur": duration, "cat": category}


def test_rounds_are_what_runs_between_the_marks():
    events = [
        event("before", 0, 5),
        event(MARK, 10, 1),
        event("a", 12, 2),
        event("b", 20, 3),
        event("cudaGraphLaunch", 12, 50, "cuda_runtime"),
        event(MARK, 30, 1),
        event("copy", 40, 4, "gpu_memcpy"),
    ]
    assert device_time.busy_between_marks(events) == pytest.approx([5e-6, 4e-6])


def test_kernels_that_overlap_count_once():
    events = [event(MARK, 0, 1), event("a", 2, 10), event("b", 4, 2), event("c", 8, 8)]
    assert device_time.busy_between_marks(reversed(events)) == pytest.approx([14e-6])


@pytest.fixture
def profiler(monkeypatch):
    """A profiler that "records" what the list holds."""
    events: list[dict] = []

    class Profile:
        def __init__(self, activities):
            pass

        def __enter__(self):
            events.clear()
            return self

        def __exit__(self, *error):
            return None

        def export_chrome_trace(self, path):
            Path(path).write_text(json.dumps({"traceEvents": events}))

    module = types.ModuleType("torch.profiler")
    module.profile = Profile
    module.ProfilerActivity = types.SimpleNamespace(CUDA=None)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.profiler", module)
    return events


def arm(name: str, profiler: list[dict], microseconds: float, round_seconds: float = 0.0) -> Arm:
    made = Arm(name, [lambda links: (links, [])] * 2, passes=5, round_seconds=round_seconds)
    made.round = lambda: profiler.append(event(name, 100 * len(profiler), microseconds)) or 0.0
    return made


def test_arms_take_turns_and_slow_ones_run_less_often(profiler, monkeypatch):
    monkeypatch.setattr(device_time, "_mark", lambda: profiler.append(event(MARK, 100 * len(profiler), 1)))
    arms = [arm("quick", profiler, 20), arm("slow", profiler, 70, round_seconds=2 * SLOW_SECONDS)]
    found = device_time.device_rounds(arms, 3)
    assert [e["name"] for e in profiler if e["name"] != MARK] == ["quick", "slow", "slow", "quick", "quick"]
    # A round is 5 passes of 2 calls.
    assert found == {"quick": pytest.approx([2e-6] * 3), "slow": pytest.approx([7e-6] * 2)}


def test_rounds_that_were_not_recorded_are_an_error(profiler, monkeypatch):
    monkeypatch.setattr(device_time, "_mark", lambda: None)
    with pytest.raises(RuntimeError, match="recorded 0 of 2 rounds"):
        device_time.device_rounds([arm("a", profiler, 20)], 2)


def test_the_device_clock_is_refused_where_there_is_none(capsys):
    with pytest.raises(SystemExit):
        kernels.arguments(["--clock", "device"])
    assert "--clock device needs an NVIDIA GPU and torch" in capsys.readouterr().err
    assert kernels.arguments([]).clock == "wall"
