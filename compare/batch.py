"""`python -m compare.batch`: several streams that decode at once, and the first token after a cached prefix.

Contract: streams of random state of one context length, each with a state of its own (`state.lily_state`), so that they
choose different experts; one stream by the single route's loop, more by `DecodeBatch`; warm-up of the exact shape; the
median of the rounds with their spread. Before anything is timed, the logits of each stream's first common step are
compared with its own single step. The time to the first token is that of a short suffix on a cached context, from the
call to the token on the host, next to a decode step of that context.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from lily_mlx.engine import DecodeBatch, Engine, SequenceState, make_sampling
from lily_mlx.metal import current_backend

from . import results
from .arms import WARM_UP_STEPS, load_lily, prompt
from .progress import progress
from .state import lily_state

STREAMS = (1, 2, 4, 8, 16, 32)
GATE_STREAMS = 8  # streams that are also run alone, in each batch
LEAST_ERROR = 0.01  # of the logits' root mean square: what rounding may always cost
SAMPLING = make_sampling()

Clock = Callable[[], float]


def stream_states(engine: Engine, streams: int, context: int, seed: int) -> list[SequenceState]:
    """Streams of `context` tokens, with different states and next tokens."""
    config = engine.model.config
    nothing = mx.zeros((1, config.vocab_size))
    firsts = prompt(streams + 1, config.vocab_size)[1:]
    return [
        replace(lily_state(config, context, seed + 1000 * i), token=mx.array([firsts[i]], mx.uint32), logits=nothing)
        for i in range(streams)
    ]


def check_streams(engine: Engine, states: Sequence[SequenceState], gate: results.Gate) -> None:
    """The logits of a common step against each stream's own step.

    The yardstick is a chunk of one token, which shares the matrix products with the common step: that may be no further
    from the single step than twice the chunk is. The last stream is a second copy of the first, and must have its bits.
    """
    batch = DecodeBatch(engine)
    handles = [batch.add(state, SAMPLING) for state in (*states[:-1], states[0])]
    batch.step()
    chosen = batch.step()
    logits = [np.array(chosen[handle].logits)[0] for handle in handles]
    gate.at_most(
        f"{len(states)} streams: difference between two copies of a stream",
        float(np.abs(logits[0] - logits[-1]).max()),
        0.0,
    )
    ratios, agreed = [], []
    for state, ours in list(zip(states, logits, strict=True))[: min(GATE_STREAMS, len(states) - 1)]:
        assert state.token is not None
        step = engine.step(state, SAMPLING)
        chunk = engine.prefill(state, [int(state.token.item())], SAMPLING)
        single, other = np.array(step.logits)[0], np.array(chunk.logits)[0]
        limit = max(2 * _size(other - single), LEAST_ERROR * _size(single))
        ratios.append(_size(ours - single) / limit)
        agreed.append(bool(ours.argmax() in (single.argmax(), other.argmax())))
    gate.at_most(f"{len(states)} streams: error of logits, of what is allowed", max(ratios), 1.0)
    gate.at_least(f"{len(states)} streams: most likely token agrees", sum(agreed) / len(agreed), 0.75)


def _size(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values.astype(np.float64)))))


def single_steps(engine: Engine, state: SequenceState) -> Callable[[], object]:
    """A function that takes the next token of one stream, with a step of look-ahead where there is one."""
    held = [state]

    def step() -> int:
        state = held[0]
        ahead = engine.step(state, SAMPLING)
        assert state.token is not None
        assert ahead.token is not None
        mx.async_eval(ahead.token)
        held[0] = ahead
        return int(state.token.item())

    return step


def common_steps(engine: Engine, states: Sequence[SequenceState]) -> Callable[[], object]:
    """A function that takes the next token of each stream."""
    batch = DecodeBatch(engine)
    for state in states:
        batch.add(state, SAMPLING)
    return batch.step


def timed(step: Callable[[], object], steps: int, rounds: int, clock: Clock) -> list[float]:
    """Seconds of one step in each round."""
    for _ in range(WARM_UP_STEPS):
        step()
    taken = []
    for _ in range(rounds):
        start = clock()
        for _ in range(steps):
            step()
        taken.append((clock() - start) / steps)
    return taken


def first_token(engine: Engine, state: SequenceState, suffix: Sequence[int], rounds: int, clock: Clock) -> list[float]:
    """Seconds from a cached state and a suffix to the next token on the host, in each round."""
    taken = []
    for index in range(rounds + 2):  # the first two compile and settle
        start = clock()
        token = engine.prefill(state, suffix, SAMPLING).token
        assert token is not None
        token.item()
        if index >= 2:
            taken.append(clock() - start)
    return taken


def _row(phase: str, streams: int, context: int, seconds: Sequence[float], **more: Any) -> dict[str, Any]:
    middle = statistics.median(seconds)
    return {
        "phase": phase,
        "streams": streams,
        "length": context,
        "seconds": middle,
        "tokens_per_s": streams / middle,
        "rounds": list(seconds),
        "spread": results.spread(seconds),
        "backend": current_backend(),
        "peak_memory_bytes": mx.get_peak_memory(),
        **more,
    }


def measure(engine: Engine, options: argparse.Namespace, gate: results.Gate, clock: Clock) -> list[dict[str, Any]]:
    """A row for each number of streams, and one for the cached prefix. Each is checked before it is timed."""
    rows = []
    for streams in progress(options.streams, "batch"):
        states = stream_states(engine, streams, options.context, options.seed)
        mx.reset_peak_memory()
        if streams > 1:
            check_streams(engine, states, gate)
            gate.require_green()
        step = common_steps(engine, states) if streams > 1 else single_steps(engine, states[0])
        del states
        rows.append(_row("decode", streams, options.context, timed(step, options.steps, options.rounds, clock)))
        del step
        mx.clear_cache()
        print(f"  {streams} streams: {rows[-1]['tokens_per_s']:.1f} tokens/s", file=sys.stderr)
    (state,) = stream_states(engine, 1, options.prefix, options.seed)
    alone = timed(single_steps(engine, state), options.steps, options.rounds, clock)
    suffix = prompt(options.suffix, engine.model.config.vocab_size)
    taken = first_token(engine, state, suffix, max(options.rounds, 5), clock)
    more = {"suffix": options.suffix, "decode_steps": statistics.median(taken) / statistics.median(alone)}
    rows.append(_row("first token", 1, options.prefix, taken, step_rounds=alone, **more))
    return rows


def steady(rows: Sequence[dict[str, Any]], drift: float) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows whose rounds agree, and the reasons of those left out."""
    kept, refused = [], []
    for row in rows:
        name = f"{row['phase']} with {row['streams']} streams"
        try:
            results.require_steady(row["rounds"], drift, name)
            results.require_steady(row.get("step_rounds", row["rounds"]), drift, f"the step beside {name}")
            kept.append(row)
        except results.GateError as error:
            refused.append(str(error))
    return kept, refused


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Streams with their speed in all and for each, then the cached prefix, as far as they are there."""
    decode = [row for row in rows if row["phase"] == "decode"]
    base = next((row["tokens_per_s"] for row in decode if row["streams"] == 1), None)
    lines = [
        [
            row["streams"],
            row["length"],
            1e3 * row["seconds"],
            row["tokens_per_s"],
            row["tokens_per_s"] / row["streams"],
            row["tokens_per_s"] / base if base else None,
        ]
        for row in decode
    ]
    headings = ["streams", "context", "ms for a step", "tokens/s in all", "tokens/s for each", "of one stream's"]
    found = results.table(headings, lines)
    for row in rows:
        if row["phase"] == "first token":
            found += (
                f"\n\nfirst token after {row['suffix']} new tokens on {row['length']} cached ones: "
                f"{1e3 * row['seconds']:.2f} ms, {row['decode_steps']:.2f} decode steps"
            )
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare.batch", description=__doc__)
    parser.add_argument("--model", default="synthetic", help="'synthetic', 'tiny' or a checkpoint directory")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--context", type=int, default=1024, help="tokens of each stream before the steps")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefix", type=int, default=4096, help="cached tokens before a new question")
    parser.add_argument("--suffix", type=int, default=20, help="tokens of the new question")
    parser.add_argument("--drift", type=float, default=0.10, help="largest spread between rounds")
    parser.add_argument("--layers", type=int, help="fewer layers of the synthetic model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true", help="do not write a result file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, clock: Clock = time.perf_counter) -> None:
    options = arguments(argv)
    model = load_lily(options.model, options.seed, options.layers)
    mx.eval(model.arrays)
    gate = results.Gate()
    rows = measure(Engine(model), options, gate, clock)
    gate.require_green()
    rows, refused = steady(rows, options.drift)
    print(as_table(rows))
    if rows and not options.no_write:
        settings = {k: v for k, v in vars(options).items() if k != "no_write"}
        path = results.write("batch", rows, seed=options.seed, gate=gate, name=options.model, settings=settings)
        print(f"wrote {path}", file=sys.stderr)
    if refused:
        raise results.GateError("\n".join(refused))


if __name__ == "__main__":
    main()
