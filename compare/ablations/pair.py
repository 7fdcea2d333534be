"""One mechanism measured: the engine with it and without it, in turn, after both gave the same output."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx

from lily_mlx.engine import DEFAULT_CHUNK_SIZE
from lily_mlx.model import Model

from .. import results
from ..arms import Clock, Timing, prompt
from ..sweep import order
from .form import Form, FormArm

Phase = Literal["prefill", "decode"]
Row = dict[str, Any]

# Both forms round at about the same points and add in another order. How far that alone moves logits depends on the
# model (a near tie of a router moves them much), so the limit follows the distance between the engine's own two
# paths, decode and prefill, on the same tokens. The least is the tolerance of the kernels' own tests.
TOLERANCE = 2e-2
NOISE_FACTOR = 3.0
MAX_NOISE = 0.15
GATE_ROWS = 32
GATE_STEPS = 8


@dataclass
class Run:
    """What all mechanisms of a run share.

    Attributes:
        model: the weights.
        seed: of the synthetic context.
        rounds: how often each form is timed; they alternate.
        steps: measured decode steps of a round.
        drift: largest spread between the rounds of a form.
        chunk_size: tokens of the engine's prompt chunks.
        clock: the timer.
    """

    model: Model
    seed: int = 0
    rounds: int = 4
    steps: int = 64
    drift: float = 0.1
    chunk_size: int = DEFAULT_CHUNK_SIZE
    clock: Clock = time.perf_counter
    gate: results.Gate = field(default_factory=results.Gate)
    tolerance: float = TOLERANCE

    def engine(self) -> FormArm:
        """The engine as it is."""
        return FormArm(self.model, self.seed, self.chunk_size)

    def measure_noise(self, rows: int = GATE_ROWS) -> None:
        """Sets the tolerance from the distance between the engine's two paths.

        Raises:
            GateError: the paths are so far apart that no form could be told from a wrong one.
        """
        arm = self.engine()
        tokens = prompt(rows, arm.vocab_size)
        start = arm.engine.prefill(arm.engine.empty(), tokens[:1], arm._sampling)
        noise = distance(arm.follow(start, tokens[1:]), arm.prefill_logits(tokens, rows - 1))
        self.gate.at_most("decode against prefill, rms error of logits / their deviation", noise, MAX_NOISE)
        self.gate.require_green()
        self.tolerance = max(TOLERANCE, NOISE_FACTOR * noise)


def distance(a: mx.array, b: mx.array) -> float:
    """Root mean square of a - b over the standard deviation of b; NaN if a value is not a number."""
    if a.shape != b.shape:
        raise ValueError(f"logits of shape {a.shape} and {b.shape} cannot be compared")
    return float((mx.sqrt(mx.mean(mx.square(a - b))) / mx.std(b)).item())


@dataclass(frozen=True)
class Pair:
    """A mechanism of the engine and what takes its place.

    Attributes:
        name: as the command line and the results call it.
        replaced_by: the alternative, in a few words.
        phase: what is timed.
        article: effect that the article reports at each length, None where it gives none.
        form: opens the alternative.
        arm: runs it, where the alternative is not a function of the engine but how it is called.
        least_length: shortest length at which the alternative differs from the engine.
        control: opens the alternative's own kernels with the mechanism on. Its speed tells the mechanism's effect
            from that of everything else in which the alternative differs from the engine.
    """

    name: str
    replaced_by: str
    phase: Phase
    article: Mapping[int, float | None]
    form: Form = contextlib.nullcontext
    arm: type[FormArm] | None = None
    least_length: Callable[[Run], int] = lambda run: 1
    control: Form | None = None

    def rows(self, run: Run, length: int) -> list[Row]:
        """Measures the pair at one length.

        Raises:
            GateError: the forms disagree or are the same, or a form's rounds drift apart.
        """
        least = self.least_length(run)
        if length < least:
            raise results.GateError(f"{length} tokens are too few, both forms are the same: give {least} or more")
        forms = self._forms(run)
        self._check(run, forms, length)
        timings: dict[str, list[Timing]] = {name: [] for name in forms}
        memory = dict.fromkeys(forms, 0)
        for name in [*forms] if self.phase == "prefill" else []:
            self._time(run, forms[name], length)  # warm-up of the exact shape; decode warms up by itself
        for name in order(list(forms), run.rounds):
            mx.reset_peak_memory()
            timings[name].append(self._time(run, forms[name], length))
            memory[name] = max(memory[name], int(mx.get_peak_memory()))
        for name in forms:
            run.gate.equal(f"{self.name} at {length}: tokens of {name}", [t.digest for t in timings[name]])
        run.gate.require_green()
        # Forms that round in another order may choose another token later, with the same logits at first.
        same_tokens = timings["with"][0].digest == timings["without"][0].digest
        return [{**self._row(run, length, timings, memory), "same_tokens": same_tokens}]

    def _forms(self, run: Run) -> dict[str, tuple[Form, FormArm]]:
        other = self.arm(run.model, run.seed) if self.arm else run.engine()
        forms: dict[str, tuple[Form, FormArm]] = {
            "with": (contextlib.nullcontext, run.engine()),
            "without": (self.form, other),
        }
        if self.control:
            forms["control"] = (self.control, run.engine())
        return forms

    def _check(self, run: Run, forms: Mapping[str, tuple[Form, FormArm]], length: int) -> None:
        """Compares the forms' logits with the engine's."""
        logits = {}
        for name, (form, arm) in forms.items():
            tokens = prompt(length if self.phase == "prefill" else GATE_STEPS, arm.vocab_size)
            with form():
                if self.phase == "prefill":
                    logits[name] = arm.prefill_logits(tokens, GATE_ROWS)
                else:
                    logits[name] = arm.step_logits(length, tokens)
        for name in logits:
            if name != "with":
                error = distance(logits[name], logits["with"])
                run.gate.at_most(f"{self.name} at {length}: rms error of logits ({name})", error, run.tolerance)
        run.gate.require_green()

    def _time(self, run: Run, form_and_arm: tuple[Form, FormArm], length: int) -> Timing:
        form, arm = form_and_arm
        with form():
            if self.phase == "prefill":
                return arm.prefill(prompt(length, arm.vocab_size), run.clock)
            return arm.decode(length, run.steps, run.clock)

    def _row(self, run: Run, length: int, timings: Mapping[str, Sequence[Timing]], memory: Mapping[str, int]) -> Row:
        speeds = {name: [t.tokens_per_s for t in timings[name]] for name in timings}
        for name, values in speeds.items():
            results.require_steady(values, run.drift, f"{self.name} at {length} ({name})")
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        row: Row = {
            "mechanism": self.name,
            "replaced_by": self.replaced_by,
            "phase": self.phase,
            "length": length,
            **medians,
            "effect": medians["with"] / medians["without"] - 1,
            "article_effect": self.article.get(length),
            "spread": max(results.spread(values) for values in speeds.values()),
            "rounds": speeds,
            "peak_memory_bytes": memory["with"],
            "peak_memory_bytes_without": memory["without"],
        }
        if "control" in medians:
            row["effect_of_control"] = medians["control"] / medians["without"] - 1
        return row
