"""The engines under comparison, behind one small interface, on the same weights.

An arm prefills a prompt and decodes after a context. What lies outside the timer, for every engine alike:
loading, tokenising, templates, detokenising.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

ENGINES = ("lily_mlx", "mlx_lm", "mlx_lm+metal", "mlx_lm+lily_mlx")
WARM_UP_STEPS = 8

Clock = Callable[[], float]


@dataclass(frozen=True)
class Timing:
    """One measured round.

    Attributes:
        seconds: elapsed time.
        tokens: tokens that it accounts for.
        digest: a hash of the token ids that came out.
    """

    seconds: float
    tokens: int
    digest: str

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Arm(Protocol):
    """An engine with a model."""

    vocab_size: int

    def prefill(self, tokens: Sequence[int], clock: Clock) -> Timing:
        """Times a prompt from the call to its first generated token on the host."""
        ...

    def decode(self, context: Sequence[int] | int, steps: int, clock: Clock) -> Timing:
        """Times `steps` tokens after a context: a prompt, or a number of positions of random state."""
        ...


def prompt(length: int, vocab_size: int) -> list[int]:
    """The contract's prompt: token i is ((i * 2654435761) mod 2^32) mod vocabulary size."""
    return [((i * 2654435761) % 2**32) % vocab_size for i in range(length)]


def digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def model_source(name: str) -> Path | None:
    """The directory of a model named on the command line; None for the synthetic full-size one."""
    if name == "synthetic":
        return None
    if name == "tiny":
        from lily_mlx.checkpoints import bundled_checkpoint

        return bundled_checkpoint()
    path = Path(name)
    if not path.is_dir():
        raise SystemExit(f"--model {name}: no such directory; give a checkpoint, 'tiny' or 'synthetic'")
    return path


def load_lily(name: str, seed: int, layers: int | None = None) -> Any:
    """A `lily_mlx` model. Its engine does not check its kernels: every comparison has a gate of its own."""
    from lily_mlx.model import Model

    os.environ.setdefault("LILY_MLX_SELF_TEST", "0")

    directory = model_source(name)
    if directory is not None:
        return Model.load(directory)
    from . import full_size, synthetic

    config = full_size.configuration(layers or full_size.LAYERS)
    return Model.from_arrays(config, synthetic.arrays(config, seed))


def load_mlx_lm(name: str, seed: int, layers: int | None = None) -> Any:
    """An `mlx_lm` model with the same weights."""
    directory = model_source(name)
    if directory is not None:
        from mlx_lm.utils import load_model

        return load_model(directory)[0]
    from . import full_size, synthetic
    from .mlx_lm_trace import build

    config = full_size.configuration(layers or full_size.LAYERS)
    model = build(config)
    model.load_weights(list(synthetic.arrays(config, seed)), strict=True)
    return model


def make_arm(engine: str, model_name: str, seed: int, layers: int | None = None) -> Arm:
    """Loads a model into an engine.

    Raises:
        SystemExit: unknown engine or model.
    """
    if engine == "lily_mlx":
        return LilyArm(load_lily(model_name, seed, layers), seed)
    if engine == "mlx_lm":
        return MlxLmArm(load_mlx_lm(model_name, seed, layers), seed)
    if engine == "mlx_lm+metal":
        from .mlx_metal import install_gated_delta

        install_gated_delta()
        return MlxLmArm(load_mlx_lm(model_name, seed, layers), seed)
    if engine == "mlx_lm+lily_mlx":
        from lily_mlx import accelerate

        return AcceleratedArm(accelerate(load_mlx_lm(model_name, seed, layers)), seed)
    raise SystemExit(f"--engines {engine}: choose from {', '.join(ENGINES)}")


class LilyArm:
    """Our engine, by the loop that `lily_mlx.generate` uses."""

    def __init__(self, model: Any, seed: int):
        from lily_mlx.engine import Engine, make_sampling

        self.engine = Engine(model)
        self.vocab_size = model.config.vocab_size
        self._sampling = make_sampling()
        self._seed = seed
        mx.eval(model.arrays)

    def prefill(self, tokens: Sequence[int], clock: Clock = time.perf_counter) -> Timing:
        start = clock()
        state = self.engine.prefill(self.engine.empty(), tokens, self._sampling)
        first = int(state.token.item())
        return Timing(clock() - start, len(tokens), digest([first]))

    def decode(self, context: Sequence[int] | int, steps: int, clock: Clock = time.perf_counter) -> Timing:
        if isinstance(context, int):
            from .state import lily_state

            state = lily_state(self.engine.model.config, context, self._seed)
        else:
            state = self.engine.prefill(self.engine.empty(), context, self._sampling)
        ids = self._tokens(state)
        return _timed_steps(ids, steps, clock)

    def _tokens(self, state: Any) -> Iterator[int]:
        """Tokens with one step of look-ahead where the backend has it."""
        while True:
            ahead = None
            if self.engine.looks_ahead:
                ahead = self.engine.step(state, self._sampling)
                mx.async_eval(ahead.token)
            yield int(state.token.item())
            state = ahead or self.engine.step(state, self._sampling)


class MlxLmArm:
    """mlx-lm, by its fastest direct path: `generate_step`, which looks one token ahead."""

    def __init__(self, model: Any, seed: int):
        self.model = model
        self.vocab_size = int(model.language_model.args.vocab_size)
        self._seed = seed
        mx.eval(model.parameters())

    def prefill(self, tokens: Sequence[int], clock: Clock = time.perf_counter) -> Timing:
        from mlx_lm.generate import generate_step

        start = clock()
        steps = generate_step(mx.array(tokens, mx.uint32), self.model, max_tokens=1)
        first = int(next(steps)[0])
        return Timing(clock() - start, len(tokens), digest([first]))

    def decode(self, context: Sequence[int] | int, steps: int, clock: Clock = time.perf_counter) -> Timing:
        from mlx_lm.generate import generate_step

        cache = self.model.make_cache()
        tokens: Sequence[int] = [1]
        if isinstance(context, int):
            from .state import fill_mlx_lm_cache

            fill_mlx_lm_cache(cache, self.model, context, self._seed)
        else:
            tokens = context
        generator = generate_step(
            mx.array(tokens, mx.uint32), self.model, max_tokens=steps + WARM_UP_STEPS + 2, prompt_cache=cache
        )
        return _timed_steps((int(token) for token, _ in generator), steps, clock)


class AcceleratedArm(MlxLmArm):
    """mlx-lm's loop on a model that `lily_mlx.accelerate` returned."""

    def decode(self, context: Sequence[int] | int, steps: int, clock: Clock = time.perf_counter) -> Timing:
        if isinstance(context, int):
            raise SystemExit("--synthetic-context: mlx_lm+lily_mlx has no caches of random state; use a prompt")
        return super().decode(context, steps, clock)


def _timed_steps(ids: Iterator[int], steps: int, clock: Clock) -> Timing:
    for _ in range(WARM_UP_STEPS):
        next(ids)
    start = clock()
    tokens = [next(ids) for _ in range(steps)]
    return Timing(clock() - start, steps, digest(tokens))
