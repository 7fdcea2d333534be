"""`python -m compare.sweep`: prefill and decode at many lengths, both engines side by side.

Contract: the prompt of `arms.prompt`; a fresh process per arm; warm-up of the exact shape; arms alternate
(A B B A); 64 decode steps with one step of look-ahead; prefill timed to the first token on the host; the
digest of the tokens repeats between rounds; the median of the rounds is reported with its spread, and a row
whose rounds drift apart is left out with its reason. Before anything is timed, both engines' logits on the
same weights are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from . import consistency, results
from .arms import ENGINES, load_lily, load_mlx_lm
from .progress import progress

LENGTHS = tuple(2**i for i in range(8, 18))
DEFAULT_DRIFT = 0.10


def order(engines: Sequence[str], rounds: int) -> list[str]:
    """Engines in alternating order: A B, B A, A B, ..."""
    return [engine for i in range(rounds) for engine in (engines if i % 2 == 0 else reversed(engines))]


def run_arm(engine: str, phase: str, lengths: Sequence[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs one arm in a fresh process and returns its rows."""
    command = [sys.executable, "-m", "compare.arm", "--engine", engine, "--phase", phase]
    command += ["--model", options.model, "--steps", str(options.steps), "--seed", str(options.seed)]
    command += ["--lengths", *map(str, lengths)]
    if options.layers:
        command += ["--layers", str(options.layers)]
    if options.synthetic_context:
        command.append("--synthetic-context")
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    if not sys.stderr.isatty():
        print(f"{engine} {phase} {list(lengths)}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if done.returncode:
        raise SystemExit(f"the arm {engine} ({phase} {list(lengths)}) failed:\n{done.stderr.strip()}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:  # what is known should the run end before its table
        print(f"  {engine} {phase} {row['length']}: {row['seconds']:.4f} s, tokens {row['digest']}", file=sys.stderr)
    return rows


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, str, list[int]]]:
    """(engine, phase, lengths) of each process, in order."""
    for phase in options.phases:
        groups = [list(options.lengths)] if options.process == "engine" else [[n] for n in options.lengths]
        for lengths in groups:
            for engine in order(options.engines, options.rounds):
                limit = options.baseline_limit if engine != "lily_mlx" and phase == "prefill" else None
                within = [n for n in lengths if limit is None or n <= limit]
                if within:
                    yield engine, phase, within


def summarise(
    rounds: Sequence[dict[str, Any]], gate: results.Gate, drift: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each (phase, length, engine), the median of its rounds, and the reasons of rows left out.

    A row is left out where its rounds drift apart by more than `drift` of their median. Rounds that gave other tokens
    make the gate red.
    """
    rows, refused = [], []
    keys = sorted({(r["phase"], r["length"], r["engine"]) for r in rounds})
    for phase, length, engine in keys:
        own = [r for r in rounds if (r["phase"], r["length"], r["engine"]) == (phase, length, engine)]
        speeds = [r["tokens"] / r["seconds"] for r in own]
        name = f"{engine} {phase} at {length}"
        gate.equal(f"digest of {name}", [r["digest"] for r in own])
        try:
            results.require_steady(speeds, drift, name)
        except results.GateError as error:
            refused.append(str(error))
            continue
        rows.append(
            {
                "phase": phase,
                "length": length,
                "engine": engine,
                "tokens_per_s": statistics.median(speeds),
                "rounds": speeds,
                "spread": results.spread(speeds),
                "digest": own[0]["digest"],
                "backend": own[0]["backend"],
                "peak_memory_bytes": max(r["peak_memory_bytes"] for r in own),
            }
        )
    return rows, refused


def check_engines(options: argparse.Namespace, gate: results.Gate) -> None:
    """Compares the engines' logits on the weights that will be timed."""
    model = load_lily(options.model, options.seed, options.layers)
    tokens = consistency.text_tokens(options.model, options.gate_positions, model.config.vocab_size)
    ours = consistency.lily_logits(model, tokens)
    baseline = load_mlx_lm(options.model, options.seed, options.layers)
    theirs = consistency.mlx_lm_logits(baseline, tokens)
    exact = consistency.mlx_lm_logits(consistency.in_float32(baseline), tokens)
    consistency.check(gate, ours, theirs, exact)


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Engines side by side, with our ratio to each baseline."""
    engines = [e for e in ENGINES if any(r["engine"] == e for r in rows)]
    baselines = [e for e in engines if e != "lily_mlx"]
    lines = []
    for phase, length in sorted({(r["phase"], r["length"]) for r in rows}):
        speed = {r["engine"]: r["tokens_per_s"] for r in rows if (r["phase"], r["length"]) == (phase, length)}
        ratios = [speed["lily_mlx"] / speed[b] if b in speed and "lily_mlx" in speed else None for b in baselines]
        lines.append([phase, length, *(speed.get(e) for e in engines), *ratios])
    return results.table(["phase", "length", *engines, *(f"ratio to {b}" for b in baselines)], lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare.sweep", description=__doc__)
    parser.add_argument("--model", default="synthetic", help="'synthetic', 'tiny' or a checkpoint directory")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["lily_mlx", "mlx_lm"])
    parser.add_argument("--phases", nargs="+", choices=("prefill", "decode"), default=["prefill", "decode"])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--synthetic-context", action="store_true", help="random caches instead of a prefill")
    parser.add_argument("--baseline-limit", type=int, help="longest prompt of the baselines' prefill")
    parser.add_argument("--process", choices=("length", "engine"), default="length", help="fresh process for each")
    parser.add_argument("--cooldown", type=float, default=0.0, help="seconds of rest before each process")
    parser.add_argument("--drift", type=float, default=DEFAULT_DRIFT, help="largest spread between rounds")
    parser.add_argument("--gate-positions", type=int, default=64)
    parser.add_argument("--layers", type=int, help="fewer layers of the synthetic model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true", help="do not write a result file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    gate = results.Gate()
    check_engines(options, gate)
    print(f"gate: {gate.as_dict()}", file=sys.stderr)
    gate.require_green()
    rounds: list[dict[str, Any]] = []
    for engine, phase, lengths in progress(list(jobs(options)), "sweep"):
        if options.cooldown:
            time.sleep(options.cooldown)
        rounds += run_arm(engine, phase, lengths, options)
    rows, refused = summarise(rounds, gate, options.drift)
    gate.require_green()
    print(as_table(rows))
    if rows and not options.no_write:
        settings = {k: v for k, v in vars(options).items() if k != "no_write"}
        path = results.write(
            "sweep", rows, seed=options.seed, gate=gate, name=options.model, settings=settings, refused=refused
        )
        print(f"wrote {path}", file=sys.stderr)
    if refused:
        raise results.GateError("\n".join(refused))


if __name__ == "__main__":
    main()
