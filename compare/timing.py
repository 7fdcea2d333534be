"""Timing of kernels on MLX, which evaluates lazily and overlaps what does not depend on each other.

A *pass* is a series of calls, each on its own copy of the inputs, so that weights come from memory and not
from a cache. Where a kernel allows it, an input of a call is a view of an output of the call before it (a
residual, a state, the activations): such calls run one after another, as in a model's step. Other calls are
independent and may overlap. A pass is one function under `mx.compile` on a GPU; a round evaluates several
passes, every output of every call included, and waits for the last. Nothing is subtracted: `launch_floor`
says what an empty kernel costs when it is timed in the same way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import mlx.core as mx

from lily_mlx.metal import Kernel, current_backend

from . import results

Links = dict[str, mx.array]
# One call: takes links from the call before, returns links for the next one and what else it computed.
Call = Callable[[Links], tuple[Links, list[mx.array]]]

ROUND_SECONDS = 0.02
MOST_PASSES = 400
KEPT_BYTES = 4 << 30  # outputs that a round may hold until it ends
SLOW_SECONDS = 0.25  # a round that takes longer is repeated SLOW_ROUNDS times only
SLOW_ROUNDS = 2

_EMPTY = Kernel.from_source(
    "empty", ["x"], ["out"], "if (thread_position_in_grid.x == 0) { out[0] = x[0]; }", max_threads=512
)


def clock() -> float:
    """Seconds of a monotonic clock."""
    return time.perf_counter()


@dataclass(frozen=True)
class Measurement:
    """Seconds of one call.

    Attributes:
        seconds: median of the rounds.
        spread: (max - min) / median of the rounds.
        rounds: seconds of one call in each round.
    """

    seconds: float
    spread: float
    rounds: tuple[float, ...]

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Measurement:
        return cls(statistics.median(rounds), results.spread(rounds), tuple(rounds))


@dataclass
class Arm:
    """One of the things that are timed side by side.

    Attributes:
        name: for messages.
        calls: the calls of a pass.
        links: what the first call takes over.
        compiled: the pass goes through `mx.compile`.
        passes: passes of a round, chosen by `warm_up`.
        round_seconds: about how long a round takes, by `warm_up`.
    """

    name: str
    calls: Sequence[Call]
    links: Links = field(default_factory=dict)
    compiled: bool = True
    passes: int = 1
    round_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._pass: Call = self._one_pass
        if self.compiled and current_backend() != "cpu":  # kernels of the cpu backend cannot be traced
            self._pass = mx.compile(self._one_pass)

    def _one_pass(self, links: Links) -> tuple[Links, list[mx.array]]:
        kept: list[mx.array] = []
        for call in self.calls:
            links, outputs = call(links)
            kept += outputs
        return links, kept

    def warm_up(self) -> None:
        """Runs everything that happens once, then chooses the passes of a round of about ROUND_SECONDS."""
        links, kept = self._pass(self.links)
        mx.eval(links, kept)
        size = sum(array.nbytes for array in kept)
        del links, kept
        if current_backend() == "cpu":
            return  # a launch returns when it has run, so one pass is a round
        elapsed = max(self.round() * len(self.calls), 1e-9)
        wanted = min(MOST_PASSES, round(ROUND_SECONDS / elapsed), KEPT_BYTES // max(size, 1))
        self.passes = max(1, wanted)
        self.round_seconds = self.passes * elapsed
        if self.passes > 1:
            self.round()

    def round(self) -> float:
        """Seconds of one call, from a round of `passes` passes."""
        start = clock()
        links, kept = self.links, []
        for _ in range(self.passes):
            links, outputs = self._pass(links)
            mx.async_eval(links, outputs)
            kept += outputs
        mx.eval(links, kept)
        return (clock() - start) / (self.passes * len(self.calls))


# Runs arms in alternating rounds (A B C, C B A, ...): seconds of one call of each, by round.
Rounds: TypeAlias = Callable[[Sequence[Arm], int], dict[str, list[float]]]


def wall_rounds(arms: Sequence[Arm], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call of each arm in each round, by the wall clock. Slow rounds are fewer."""
    samples: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for index in range(rounds):
        for arm in arms if index % 2 == 0 else reversed(arms):
            taken = samples[arm.name]
            if len(taken) >= SLOW_ROUNDS and taken[0] * arm.passes * len(arm.calls) > SLOW_SECONDS:
                continue
            taken.append(arm.round())
    return samples


def measure(
    arms: Sequence[Arm], rounds: int, drift: float, attempts: int = 3, sample: Rounds = wall_rounds
) -> dict[str, Measurement | str]:
    """Times arms side by side. The arms are warm.

    Args:
        arms: what to time.
        rounds: rounds of each arm; slow ones get fewer.
        drift: largest spread of an arm's rounds; `attempts` times all rounds are repeated to get below it.
        sample: runs the rounds, see `wall_rounds` and `device_time.device_rounds`.

    Returns:
        For each arm its measurement, or a message where its rounds never agreed.
    """
    found: dict[str, Measurement | str] = {}
    waiting = list(arms)
    for _ in range(attempts):
        for name, taken in sample(waiting, rounds).items():
            try:
                results.require_steady(taken, drift, name)
                found[name] = Measurement.of(taken)
            except results.GateError as error:
                found[name] = str(error)
        waiting = [arm for arm in waiting if isinstance(found[arm.name], str)]
        if not waiting:
            break
    return found


def _single(name: str, arm: Arm, rounds: int, drift: float, sample: Rounds = wall_rounds) -> float:
    """Seconds of a call of one arm alone.

    Raises:
        GateError: its rounds drift.
    """
    arm.warm_up()
    found = measure([arm], rounds, drift, sample=sample)[name]
    if isinstance(found, str):
        raise results.GateError(found)
    return found.seconds


def copy_bandwidth(size: int, rounds: int, drift: float, sample: Rounds = wall_rounds) -> float:
    """Bytes per second, read and written together, of an elementwise pass over `size` bytes."""
    x = mx.zeros(size // 4, mx.float32)
    mx.eval(x)

    def call(links: Links) -> tuple[Links, list[mx.array]]:
        return {"x": -links["x"]}, []

    seconds = _single("copy", Arm("copy", [call], {"x": x}), rounds, drift, sample)
    return float(2 * x.nbytes / seconds)


def matrix_rate(size: int, rounds: int, drift: float, sample: Rounds = wall_rounds) -> float:
    """Operations per second of `mx.matmul` of two bfloat16 matrices of `size` rows and columns."""
    a, b = (mx.random.normal((size, size), dtype=mx.bfloat16, key=mx.random.key(i)) for i in range(2))
    b = (b / size**0.5).astype(mx.bfloat16)
    mx.eval(a, b)

    def call(links: Links) -> tuple[Links, list[mx.array]]:
        return {"a": links["a"] @ b}, []

    seconds = _single("matmul", Arm("matmul", [call], {"a": a}), rounds, drift, sample)
    return 2 * size**3 / seconds


def launch_floor(rounds: int, drift: float, calls: int = 256) -> float:
    """Seconds of an empty kernel that depends on the one before it."""

    def call(links: Links) -> tuple[Links, list[mx.array]]:
        (out,) = _EMPTY(
            [links["x"]],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(8,)],
            output_dtypes=[mx.float32],
        )
        return {"x": out}, []

    return _single("empty kernel", Arm("empty kernel", [call] * calls, {"x": mx.zeros(8)}), rounds, drift)


def require_all_steady(found: Mapping[str, Measurement | str], name: str) -> Measurement:
    """The measurement of `name`.

    Raises:
        GateError: its rounds never agreed.
    """
    measured = found[name]
    if isinstance(measured, str):
        raise results.GateError(measured)
    return measured
