"""The generation loop: tokens come out one by one while the device is a step ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from lily_mlx.model import Sampling

from .engine import DEFAULT_CHUNK_SIZE, Engine, Progress
from .sampling import HostChooser, LogitsProcessor, Sampler
from .state import SequenceState

_CLEAR_EVERY = 256  # tokens between returns of unused buffers to the system


def generate_tokens(
    engine: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int = -1,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    progress: Progress | None = None,
    start: SequenceState | None = None,
    keep: Callable[[SequenceState], object] | None = None,
) -> Iterator[tuple[int, mx.array]]:
    """Generates token ids and the logits that each was chosen from (float32 [1, V], on the device).

    Where the backend allows it, the next step is submitted before a token is read. An error in that step is
    raised when its own token is asked for.

    Args:
        engine: holds the model.
        prompt: token ids, at least one.
        sampling: how tokens are chosen if there is no sampler and no logits processor.
        max_tokens: tokens to generate; -1 for as many as the context holds.
        sampler, logits_processors: see `HostChooser`.
        chunk_size: tokens of the prompt that go through the layers at once.
        progress: called with (tokens fed, all tokens), the last time when the first token is there.
        start: the sequence that the prompt continues; None for an empty one.
        keep: called once with the state that holds the prompt and every token that came out, when the generation
            ends, is closed or fails. A last token at the end of the context has no place in it.

    Raises:
        ValueError: see `Engine.prefill`.
    """
    chooser = None
    if sampler is not None or logits_processors:
        chooser = HostChooser(sampler, logits_processors or (), mx.array(prompt, mx.uint32))
    state = start if start is not None else engine.empty()
    ahead: SequenceState | Exception | None = None
    came_out = False  # whether the caller has the state's token
    try:
        state = _choose(engine.prefill(state, prompt, sampling, chunk_size, progress), chooser)
        limit = engine.token_limit(state.length, max_tokens)
        for count in range(max(limit, 1)):
            if engine.looks_ahead and count + 1 < limit:
                ahead = _submit(engine, state, sampling, chooser)
            assert state.token is not None
            assert state.logits is not None
            token = int(state.token.item())
            if count == 0 and progress is not None:
                progress(len(prompt), len(prompt))
            if count < limit:
                came_out = True
                yield token, state.logits
            if count + 1 >= limit:
                return
            if count % _CLEAR_EVERY == 0:
                mx.clear_cache()
            if ahead is None:
                ahead = _submit(engine, state, sampling, chooser)
            if isinstance(ahead, Exception):
                raise ahead
            state, ahead, came_out = ahead, None, False
    finally:
        if keep is not None:
            keep(_fed(engine, state, ahead, sampling) if came_out else state)


def _fed(
    engine: Engine, state: SequenceState, ahead: SequenceState | Exception | None, sampling: Sampling
) -> SequenceState:
    """The state after its own token has been fed too, where that is possible."""
    if isinstance(ahead, SequenceState):
        return ahead
    if isinstance(ahead, Exception) or state.length >= engine.model.config.max_positions:
        return state
    return engine.step(state, sampling)


def _submit(
    engine: Engine, state: SequenceState, sampling: Sampling, chooser: HostChooser | None
) -> SequenceState | Exception:
    """The next state, on its way; or what went wrong, for whoever asks for its token."""
    try:
        following = _choose(engine.step(state, sampling), chooser)
        mx.async_eval(following.token)
        return following
    except Exception as error:
        return error


def _choose(state: SequenceState, chooser: HostChooser | None) -> SequenceState:
    if chooser is None:
        return state
    assert state.logits is not None
    token, logits = chooser(state.logits)
    return replace(state, token=token, logits=logits)
