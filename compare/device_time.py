"""Times by the device's own clock, on an NVIDIA GPU with torch installed.

A kernel of a few microseconds ends before the host has prepared the next one, so wall time measures the host there.
CUPTI records when each kernel ran; torch's profiler reads it for the whole process, MLX's kernels included. A round's
time is then the time in which at least one kernel ran: what the host takes in between is left out, on every arm alike.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from lily_mlx.metal import Kernel, current_backend

from .timing import SLOW_ROUNDS, SLOW_SECONDS, Arm

DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
_MARK_NAME = "between_rounds"
_MARK = Kernel.from_source(_MARK_NAME, ["x"], ["out"], "if (thread_position_in_grid.x == 0) { out[0] = x[0]; }")


def is_available() -> bool:
    """Whether `device_rounds` works here."""
    return current_backend() == "cuda" and importlib.util.find_spec("torch") is not None


def device_rounds(arms: Sequence[Arm], rounds: int) -> dict[str, list[float]]:
    """As `timing.wall_rounds`: seconds of one call of each arm in each round, by the device's clock.

    Raises:
        RuntimeError: the profiler recorded no kernel, or not every round.
    """
    order: list[Arm] = []
    for index in range(rounds):
        for arm in arms if index % 2 == 0 else reversed(arms):
            if index < SLOW_ROUNDS or arm.round_seconds <= SLOW_SECONDS:
                order.append(arm)
    _mark()  # compiled before anything is recorded

    def run() -> None:
        for arm in order:
            _mark()
            arm.round()

    samples: dict[str, list[float]] = {arm.name: [] for arm in arms}
    busy = busy_between_marks(recorded(run))
    if len(busy) != len(order):
        raise RuntimeError(f"the profiler recorded {len(busy)} of {len(order)} rounds: time by the wall clock instead")
    for arm, seconds in zip(order, busy, strict=True):
        samples[arm.name].append(seconds / (arm.passes * len(arm.calls)))
    return samples


def recorded(run: Callable[[], None]) -> list[dict[str, Any]]:
    """What torch's profiler records of CUDA while `run` runs: the events of a Chrome trace."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events: list[dict[str, Any]] = json.loads(Path(file.name).read_text())["traceEvents"]
    return events


def busy_between_marks(events: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds in which the device was busy after each mark, from the events of a Chrome trace."""
    found = [event for event in events if event.get("cat") in DEVICE_EVENTS]
    busy: list[float] = []
    end = 0.0
    for event in sorted(found, key=lambda event: event["ts"]):
        if _MARK_NAME in event["name"]:
            busy.append(0.0)
        elif busy:
            start = max(event["ts"], end)
            busy[-1] += max(0.0, event["ts"] + event["dur"] - start) * 1e-6
        end = max(end, event["ts"] + event["dur"])
    return busy


def _mark() -> None:
    mx.eval(
        _MARK([mx.zeros(8)], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(8,)], output_dtypes=[mx.float32])
    )
