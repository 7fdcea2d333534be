"""`Engine`: prefill in bounded chunks, and steps whose input and output stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from lily_mlx.doctor.selftest import replace_failing_kernels
from lily_mlx.metal import current_backend
from lily_mlx.model import Model, Sampling, arrays_of, merge_tails

from .state import SequenceState

DEFAULT_CHUNK_SIZE = 2048

Progress = Callable[[int, int], None]


class Engine:
    """Runs sequences through a model. Holds no sequence: states go in and come out.

    The first engine of a process makes sure that the kernels work on this device, see `lily_mlx.doctor.selftest`.
    """

    def __init__(self, model: Model):
        self.model = model
        if replace_failing_kernels():
            model.forget_compiled()

    @property
    def looks_ahead(self) -> bool:
        """Whether a step is submitted, not run, when it is called, so that the next can be submitted too."""
        return current_backend() != "cpu"

    def empty(self) -> SequenceState:
        """The state of a sequence without tokens."""
        return SequenceState.empty(self.model.config)

    def check_tokens(self, tokens: Sequence[int], length: int = 0) -> None:
        """Raises ValueError unless tokens can be fed after `length` others."""
        config = self.model.config
        if not len(tokens):
            raise ValueError("the prompt is empty: give at least one token")
        if length + len(tokens) > config.max_positions:
            raise ValueError(
                f"the prompt has {length + len(tokens)} tokens, but the model's context is "
                f"{config.max_positions} (max_position_embeddings): shorten the prompt"
            )
        wrong = next((t for t in tokens if not 0 <= t < config.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is not in the model's vocabulary of {config.vocab_size} tokens")

    def token_limit(self, length: int, max_tokens: int) -> int:
        """Tokens that can be generated after `length` others; with `max_tokens` -1 the context is the limit.

        The last token of a full context is generated, but there is no position to feed it at.
        """
        room = self.model.config.max_positions - length + 1
        return room if max_tokens < 0 else min(max_tokens, room)

    def prefill(
        self,
        state: SequenceState,
        tokens: Sequence[int],
        sampling: Sampling,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        progress: Progress | None = None,
    ) -> SequenceState:
        """Feeds tokens and chooses the one that follows.

        Args:
            state: the sequence so far; its own chosen token is not fed.
            tokens: token ids, at least one.
            sampling: how the following token is chosen. Penalties look back on the tokens that were fed since the
                sequence began to be sampled with penalties.
            chunk_size: tokens that go through the layers at once; bounds the memory, not the result.
            progress: called with (tokens fed, all tokens) before the first chunk and after each but the last,
                whose end is not waited for. An exception that it raises ends the prefill there.

        Returns:
            The new state; `state` stays as it is.

        Raises:
            ValueError: no tokens, an id outside the vocabulary, more tokens than the context holds, a chunk size
                below 1, or a sampling that does not fit the vocabulary or the state's memory of recent tokens.
        """
        self.check_tokens(tokens, state.length)
        sampling.check_vocabulary(self.model.config.vocab_size)
        recent = sampling.recent_or_empty(state.recent)
        if chunk_size < 1:
            raise ValueError(f"the prefill chunk size is {chunk_size}: give 1 or more")
        model, caches, length = self.model, state.caches, state.length
        done: list[mx.array] = []
        last = (len(tokens) - 1) // chunk_size * chunk_size
        for start in range(0, last, chunk_size):
            if progress is not None:
                progress(start, len(tokens))
            _, caches = model.prefill_chunk(tokens[start : start + chunk_size], length, caches)
            length += chunk_size
            # One chunk runs while the next is prepared, and no more wait in memory.
            mx.eval(done)
            mx.clear_cache()
            done = arrays_of(caches)
            mx.async_eval(done)
        if progress is not None:
            progress(last, len(tokens))
        fed = tokens[-recent.size :] if recent is not None else tokens[-1:]
        output = model.prefill(tokens[last:], length, caches, sampling, fed, recent)
        return SequenceState.after(length + len(tokens) - last, output)

    def step(self, state: SequenceState, sampling: Sampling) -> SequenceState:
        """Feeds the state's chosen token and chooses the next one; reads nothing back from the device."""
        assert state.token is not None, "prefill the sequence first"
        sampling.check_vocabulary(self.model.config.vocab_size)
        output = self.model.step(state.token, state.position, state.caches, sampling, state.recent)
        length = state.length + 1
        return SequenceState.after(length, replace(output, caches=merge_tails(output.caches, length)))
