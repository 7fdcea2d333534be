"""Speculative decoding: a draft proposes tokens and one pass over several rows verifies them.

The article found it slower: the rows of a pass choose different experts, so that a pass over k rows reads up to k
times as many expert weights. Here the parts are timed and the speed follows from a stated acceptance rate:

    tokens of a cycle  = 1 + a + ... + a^(k-1)       (k - 1 drafted tokens, each accepted with probability a)
    seconds of a cycle = pass over k rows + (k - 1) * step of the draft

The pass is the engine's prefill path on k rows, then the logits and the choice of all k rows, read by the host. The
draft is the model's own first layers with its head. Returning to the last accepted row is taken to cost nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from lily_mlx.engine import SequenceState
from lily_mlx.metal import current_backend
from lily_mlx.model import Model, arrays_of, prefill_chunk, with_arrays
from lily_mlx.model.prefill import all_logits

from .. import results
from ..arms import WARM_UP_STEPS, prompt
from ..state import lily_state
from ..sweep import order
from .form import FormArm
from .pair import Phase, Row, Run, distance

ROWS = (2, 3, 4, 5)
ACCEPTANCE = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STATED_ACCEPTANCE = 0.8
# The article's loop is 18 % slower than plain decoding, so plain decoding is 1 / 0.82 - 1 faster.
ARTICLE_EFFECT = 1 / 0.82 - 1


@dataclass(frozen=True)
class Speculation:
    """Plain decoding against verified drafts of 1 to 4 tokens."""

    name: str = "speculative-decoding"
    replaced_by: str = "a draft of the model's first layers, verified in one pass of 2 to 5 rows"
    phase: Phase = "decode"
    article: Mapping[int, float | None] | None = None

    def rows(self, run: Run, length: int) -> list[Row]:
        """Measures plain steps, draft steps and passes at one length; one row for each number of rows.

        Raises:
            GateError: a pass and single steps disagree, or rounds drift apart.
        """
        plain, draft = run.engine(), FormArm(draft_of(run.model), run.seed)
        state = lily_state(run.model.config, length, run.seed)
        self._check(run, plain, state)
        measures: dict[str, Callable[[], float]] = {
            "plain": lambda: 1 / plain.decode(length, run.steps, run.clock).tokens_per_s,
            "draft": lambda: 1 / draft.decode(length, run.steps, run.clock).tokens_per_s,
        }
        for count in ROWS:
            measures[f"pass over {count} rows"] = _pass_timer(run, state, count)
        seconds: dict[str, list[float]] = {name: [] for name in measures}
        for name in order(list(measures), run.rounds):
            seconds[name].append(measures[name]())
        for name, values in seconds.items():
            results.require_steady(values, run.drift, f"{self.name} at {length} ({name})")
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        spread = max(results.spread(values) for values in seconds.values())
        return [self._row(length, count, medians, spread, draft) for count in ROWS]

    def _check(self, run: Run, arm: FormArm, state: SequenceState) -> None:
        """A pass over k rows must give the logits of k steps."""
        tokens = prompt(max(ROWS), arm.vocab_size)
        steps = arm.follow(state, tokens)
        for count in ROWS:
            logits, _ = verify(run.model, state, tokens[:count])
            name = f"{self.name} at {state.length}: rms error of logits, {count} rows against steps"
            run.gate.at_most(name, distance(logits, steps[:count]), run.tolerance)
        run.gate.require_green()

    def _row(self, length: int, count: int, seconds: Mapping[str, float], spread: float, draft: FormArm) -> Row:
        cycle = seconds[f"pass over {count} rows"] + (count - 1) * seconds["draft"]
        speeds = {a: accepted(a, count) / cycle for a in ACCEPTANCE}
        plain = 1 / seconds["plain"]
        return {
            "mechanism": f"{self.name}-{count}-rows",
            "replaced_by": self.replaced_by,
            "phase": self.phase,
            "length": length,
            "with": plain,
            "without": speeds[STATED_ACCEPTANCE],
            "effect": plain / speeds[STATED_ACCEPTANCE] - 1,
            "article_effect": ARTICLE_EFFECT,
            "spread": spread,
            "acceptance": STATED_ACCEPTANCE,
            "speed_ratio_by_acceptance": {str(a): speed / plain for a, speed in speeds.items()},
            "speed_ratio_with_a_free_draft": accepted(1.0, count) / seconds[f"pass over {count} rows"] / plain,
            "draft_layers": draft.engine.model.config.layers,
            "seconds": {"step": seconds["plain"], "draft step": seconds["draft"], "pass": cycle},
        }


def accepted(rate: float, count: int) -> float:
    """Expected tokens of a cycle of `count` rows: the drafted ones up to the first refusal, and one more."""
    return sum(rate**i for i in range(count))


def draft_of(model: Model) -> Model:
    """The first tenth of a model's layers, at least one, with its embedding and head; shares the weights."""
    layers = max(1, model.config.layers // 10)
    return Model(replace(model.config, layers=layers), replace(model.weights, layers=model.weights.layers[:layers]))


def verify(model: Model, state: SequenceState, tokens: Sequence[int]) -> tuple[mx.array, Any]:
    """Logits after each token, float32 [k, V], by one pass over k rows, and the new caches; unevaluated."""
    chunk = mx.array(tokens, mx.uint32)
    x, caches = prefill_chunk(model.weights, model.config, chunk, state.length, state.caches)
    return all_logits(model.weights, model.config, x), caches


def _pass_timer(run: Run, state: SequenceState, count: int) -> Callable[[], float]:
    tokens = mx.array(prompt(count, run.model.config.vocab_size), mx.uint32)

    def one_pass(tokens: mx.array, *arrays: mx.array) -> list[mx.array]:
        model = run.model
        x, caches = prefill_chunk(model.weights, model.config, tokens, state.length, with_arrays(state.caches, arrays))
        return [mx.argmax(all_logits(model.weights, model.config, x), axis=-1), *arrays_of(caches)]

    # Compiled like the engine's step, so that the pass is not charged for Python.
    run_pass = one_pass if current_backend() == "cpu" else mx.compile(one_pass)

    def cycle() -> None:
        choices, *caches = run_pass(tokens, *arrays_of(state.caches))
        mx.eval(choices, *caches)
        choices.tolist()  # the host compares them with the draft

    def seconds() -> float:
        for _ in range(min(WARM_UP_STEPS, run.steps)):
            cycle()
        start = run.clock()
        for _ in range(run.steps):
            cycle()
        return (run.clock() - start) / run.steps

    return seconds
