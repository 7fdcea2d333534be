"""The engine in two forms: as it is, and with a function replaced by an alternative."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import Any

import mlx.core as mx

from lily_mlx.engine import DEFAULT_CHUNK_SIZE
from lily_mlx.model import Model, empty_caches, prefill_chunk
from lily_mlx.model.prefill import all_logits

from ..arms import Clock, LilyArm, Timing, digest
from ..state import lily_state

Form = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def replaced(owner: ModuleType | type, **functions: Callable[..., Any]) -> Iterator[None]:
    """Puts other functions in the place of a module's or a class's while the block runs.

    Raises:
        LookupError: the owner has no such function, so that replacing it would change nothing.
    """
    missing = [name for name in functions if not hasattr(owner, name)]
    if missing:
        raise LookupError(
            f"{owner.__name__} has no {', '.join(missing)}; the engine has changed, so this ablation must be rewritten"
        )
    before = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


class FormArm(LilyArm):
    """One form of the engine on a model's weights. Use it only while the form's context manager is open.

    Args:
        model: its weights are shared; compiled steps are not, because they hold the form's launches.
        seed: of the synthetic context.
        chunk_size: tokens of a prompt that go through the layers at once; None for the whole prompt.
    """

    def __init__(self, model: Model, seed: int, chunk_size: int | None = DEFAULT_CHUNK_SIZE):
        super().__init__(Model(model.config, model.weights), seed)
        self.chunk_size = chunk_size
        self._seed = seed

    def prefill(self, tokens: Sequence[int], clock: Clock = time.perf_counter) -> Timing:
        start = clock()
        engine = self.engine
        state = engine.prefill(engine.empty(), tokens, self._sampling, self.chunk_size or len(tokens))
        assert state.token is not None
        first = int(state.token.item())
        return Timing(clock() - start, len(tokens), digest([first]))

    def prefill_logits(self, tokens: Sequence[int], rows: int) -> mx.array:
        """Logits of a prompt's last positions, float32 [at most `rows`, V]."""
        model, size = self.engine.model, self.chunk_size or len(tokens)
        caches, last = empty_caches(model.config), mx.zeros((0, model.config.hidden_size), mx.bfloat16)
        for start in range(0, len(tokens), size):
            chunk = mx.array(tokens[start : start + size], mx.uint32)
            x, caches = prefill_chunk(model.weights, model.config, chunk, start, caches)
            last = mx.concatenate([last, x])[-rows:]
            mx.eval(last)
        logits = all_logits(model.weights, model.config, last)
        mx.eval(logits)
        return logits

    def step_logits(self, context: int, tokens: Sequence[int]) -> mx.array:
        """Logits after each of the given tokens, fed one by one after a synthetic context, float32 [n, V]."""
        return self.follow(lily_state(self.engine.model.config, context, self._seed), tokens)

    def follow(self, state: Any, tokens: Sequence[int]) -> mx.array:
        """Logits after each of the given tokens, fed one by one to a state, float32 [n, V]."""
        rows = []
        for token in tokens:
            state = replace(state, token=mx.array([token], mx.uint32))
            state = self.engine.step(state, self._sampling)
            rows.append(state.logits)
            mx.eval(state.logits)
        return mx.concatenate(rows)
