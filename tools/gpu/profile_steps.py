"""Where the time of a decode step or a prefill chunk goes on an NVIDIA GPU, kernel by kernel.

    python tools/gpu/profile_steps.py [--decode 256 32768 ...] [--prefill 20 2048 ...] [--output FILE]

Times come from CUPTI through torch's profiler, so torch must be installed. The model is the full-size
synthetic one of `compare`. For each case: calls and mean microseconds of every kernel, their sum, the time in
which no kernel ran, CUDA's functions on the host, and the wall time of the same work without the profiler.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from compare.arms import LilyArm, load_lily, prompt
from compare.device_time import DEVICE_EVENTS, recorded
from compare.state import lily_state

HOST = ("cuda_runtime", "cuda_driver")


def events_of(run: Callable[[], None]) -> list[dict[str, Any]]:
    """What the device and CUDA's host functions did in `run`: name, start and duration in microseconds."""
    import torch

    torch.cuda.synchronize()
    return [event for event in recorded(run) if event.get("cat") in DEVICE_EVENTS + HOST]


def summary(events: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    """Kernel times of one repeat."""
    groups: dict[str, list[float]] = collections.defaultdict(list)
    calls: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        if event["cat"] in HOST:
            calls[event["name"]].append(event["dur"])
    events = [event for event in events if event["cat"] in DEVICE_EVENTS]
    for event in events:
        match = re.search(r"lily_(\w+?_[0-9a-f]{4})[0-9a-f]{12}", event["name"])  # name and form of a kernel
        groups[match.group(1) if match else event["name"][:70]].append(event["dur"])
    events = sorted(events, key=lambda e: e["ts"])
    idle = sum(max(0.0, b["ts"] - a["ts"] - a["dur"]) for a, b in itertools.pairwise(events))
    span = events[-1]["ts"] + events[-1]["dur"] - events[0]["ts"] if events else 0.0
    rows = sorted(((sum(v), k, len(v)) for k, v in groups.items()), reverse=True)
    return {
        "span_us": span / repeats,
        "idle_us": idle / repeats,
        "busy_us": sum(r[0] for r in rows) / repeats,
        "kernels": [
            {"name": k, "calls": n / repeats, "mean_us": total / n, "sum_us": total / repeats} for total, k, n in rows
        ],
        "host": [
            {"name": k, "calls": len(v) / repeats, "mean_us": sum(v) / len(v), "sum_us": sum(v) / repeats}
            for k, v in sorted(calls.items(), key=lambda item: -sum(item[1]))
        ],
    }


def measure(run: Callable[[], None], repeats: int) -> dict[str, Any]:
    run()
    start = time.perf_counter()
    run()
    wall = (time.perf_counter() - start) / repeats * 1e6
    result: dict[str, Any] = {"wall_us": wall}
    try:
        result |= summary(events_of(run), repeats)
    except Exception as error:
        result["profiler"] = repr(error)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decode", type=int, nargs="*", default=[256, 32768, 131072])
    parser.add_argument("--prefill", type=int, nargs="*", default=[20, 2048])
    parser.add_argument("--context", type=int, default=0, help="positions before the prefilled ones")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    arm = LilyArm(load_lily("synthetic", 0, options.layers), 0)
    results = {}
    for context in options.decode:
        state = lily_state(arm.engine.model.config, context, 0)
        ids = arm._tokens(state)

        def decode(ids: Any = ids) -> None:
            for _ in range(options.steps):
                next(ids)

        results[f"decode {context}"] = measure(decode, options.steps)
    for rows in options.prefill:
        tokens = prompt(rows, arm.vocab_size)
        start = arm.engine.empty() if not options.context else lily_state(arm.engine.model.config, options.context, 0)

        def prefill(tokens: Any = tokens, start: Any = start) -> None:
            mx.eval(arm.engine.prefill(start, tokens, arm._sampling).token)

        results[f"prefill {rows} after {options.context}"] = measure(prefill, 1)
    for name, result in results.items():
        print(f"\n{name}: " + ", ".join(f"{k} {v:,.0f}" for k, v in result.items() if isinstance(v, float)))
        print(result.get("profiler", ""))
        for row in result.get("kernels", [])[:24]:
            print(f"  {row['sum_us']:10.1f} us = {row['calls']:7.1f} x {row['mean_us']:8.2f}  {row['name']}")
        for row in result.get("host", [])[:8]:
            print(
                f"  {row['sum_us']:10.1f} us = {row['calls']:7.1f} x {row['mean_us']:8.2f}  on the host: {row['name']}"
            )
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
