"""`python -m compare.arm`: one arm in a process of its own. The sweep starts it; it prints JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import mlx.core as mx

from lily_mlx.metal import current_backend

from .arms import ENGINES, make_arm, prompt


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="compare.arm", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--model", default="synthetic")
    parser.add_argument("--phase", choices=("prefill", "decode"), required=True)
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--layers", type=int, help="fewer layers of the synthetic model")
    parser.add_argument("--synthetic-context", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    start = time.perf_counter()
    arm = make_arm(arguments.engine, arguments.model, arguments.seed, arguments.layers)
    print(f"{arguments.engine}: loaded in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    for length in arguments.lengths:
        mx.reset_peak_memory()
        if arguments.phase == "prefill":
            tokens = prompt(length, arm.vocab_size)
            arm.prefill(tokens, time.perf_counter)  # warm-up of the exact shape
            timing = arm.prefill(tokens, time.perf_counter)
        else:
            context = length if arguments.synthetic_context else prompt(length, arm.vocab_size)
            timing = arm.decode(context, arguments.steps, time.perf_counter)
        row = {
            "phase": arguments.phase,
            "length": length,
            "engine": arguments.engine,
            "backend": current_backend(),
            "seconds": timing.seconds,
            "tokens": timing.tokens,
            "digest": timing.digest,
            "peak_memory_bytes": mx.get_peak_memory(),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
