"""`Sequence`: one answer in the making, from its prompt's first chunk to its last token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from lily_mlx.engine import Chosen, DecodeBatch, Engine, SequenceState, recent_tokens
from lily_mlx.model import Sampling, arrays_of

from .constraints import Constraint
from .prefix_cache import PrefixCache
from .prompts import Prompt
from .text import AnswerText, Delta, TokenTexts

SNAPSHOT_EVERY = 4096  # tokens of a long prompt between disposable snapshots
SHORTEST_BRANCH = 16  # tokens that a branch point must be ahead of the snapshot before it


@dataclass(frozen=True)
class Finished:
    """The end of an answer.

    Attributes:
        reason: "stop", "length" or "tool_calls".
        prompt_tokens, cached_tokens: of the prompt, and those of them that were not computed for this answer.
        completion_tokens: generated, the one that ended the text included.
    """

    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


Event = Delta | Finished | Exception


class Sequence:
    """One answer. Everything but `cancel` happens on the GPU thread.

    Args:
        prompt: what it answers.
        sampling: how tokens are chosen.
        max_tokens: of the answer.
        text: makes deltas of its tokens.
        emit: called with each event; the last one is `Finished` or an error.
        eos_tokens: ids that end the text.
        token_texts: for the log-probabilities.
        alternatives: likely tokens to report at each position; None for no log-probabilities.
        constraint: keeps the answer to a form; None for any.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        max_tokens: int,
        text: AnswerText,
        emit: Callable[[Event], None],
        *,
        eos_tokens: frozenset[int],
        token_texts: TokenTexts,
        alternatives: int | None = None,
        constraint: Constraint | None = None,
    ):
        self.prompt, self.max_tokens = prompt, max_tokens
        self.cancelled = self.done = self.decoding = False
        self.handle: int | None = None  # in the batch that it advances with
        # Whether it must not be in a batch: allowed tokens follow from the one before, so nothing is computed ahead.
        self.alone = constraint is not None
        self.computed_tokens = self.generated_tokens = 0
        self._sampling, self._text, self._emit = sampling, text, emit
        self._eos_tokens, self._token_texts, self._alternatives = eos_tokens, token_texts, alternatives
        self._constraint = constraint
        self._state: SequenceState | None = None
        self._pending: list[mx.array] = []
        self._tokens = list(prompt.tokens)

    def cancel(self) -> None:
        """Asks for the end, from any thread: no further step begins."""
        self.cancelled = True

    def fail(self, error: Exception) -> None:
        """Ends the answer with an error."""
        if not self.done:
            self.done, self._state = True, None
            self._emit(error)

    def release(self) -> None:
        """Lets go of the arrays: whoever still holds a cancelled answer must not hold their memory."""
        self._state, self._pending = None, []

    def prefill(self, engine: Engine, cache: PrefixCache, chunk_size: int) -> None:
        """Processes one chunk of the prompt; the last one also chooses the first token.

        Chunks end at multiples of the chunk size and where snapshots are kept, whatever else is running. The cache is
        asked again before each, because another request may just have processed the same beginning.
        """
        mx.eval(self._pending)  # one chunk in flight
        self._pending = []
        tokens, size = self.prompt.tokens, len(self.prompt.tokens)
        found, common = cache.longest(tokens)
        state = self._state or engine.empty()
        if found is not None and found.length > state.length:
            state = found.state()
        self._state = state
        start = state.length
        borders = {border for border in self.prompt.borders if start < border < size}
        if start + SHORTEST_BRANCH <= common < size:
            borders.add(common)
        end = min([size, (start // chunk_size + 1) * chunk_size, _next_multiple(start, SNAPSHOT_EVERY), *borders])
        if end == size:
            state = replace(state, recent=recent_tokens(tokens[:start], self._sampling))
            self._state = engine.prefill(state, tokens[start:], self._sampling, chunk_size)
            if self._constraint is not None:
                self._state = self._constraint.choose(self._state)
            mx.async_eval(self._state.token)
            self.decoding = True
        else:
            _, caches = engine.model.prefill_chunk(tokens[start:end], start, state.caches)
            self._state = SequenceState(end, caches, None, mx.array([end], mx.int32), None)
            self._pending = arrays_of(caches)
            mx.async_eval(self._pending)
            if end in borders or end % SNAPSHOT_EVERY == 0:
                cache.insert(tokens[:end], self._state, disposable=end not in borders)
        self.computed_tokens += end - start

    def is_last(self, engine: Engine) -> bool:
        """Whether the token that was chosen is the last one, so that it need not be fed."""
        return self.generated_tokens + 1 >= engine.token_limit(len(self.prompt.tokens), self.max_tokens)

    def join(self, batch: DecodeBatch) -> None:
        """Goes on in a batch."""
        assert self._state is not None
        self.handle = batch.add(self._state, self._sampling)
        self._state = None

    def leave(self, batch: DecodeBatch) -> None:
        """Goes on alone, if it is not over."""
        if self.handle is None:
            return
        handle, self.handle = self.handle, None
        try:
            if not (self.done or self.cancelled):
                self._state = batch.state(handle)
        finally:
            batch.remove(handle)

    def take(self, chosen: Chosen, batch: DecodeBatch, cache: PrefixCache) -> None:
        """Takes the token that the batch has fed for it."""
        assert self.handle is not None
        self.generated_tokens += 1
        self._tokens.append(chosen.token)
        if self._take(chosen.token, chosen.logits, last=False):
            self.done = True
            cache.insert(self._tokens, batch.state(self.handle))

    def step(self, engine: Engine, cache: PrefixCache) -> None:
        """Takes the token that was chosen and chooses the next one."""
        state = self._state
        assert state is not None
        assert state.token is not None
        last = self.is_last(engine)
        ahead = None
        if engine.looks_ahead and self._constraint is None and not last:
            ahead = engine.step(state, self._sampling)
            mx.async_eval(ahead.token)
        token = int(state.token.item())
        self.generated_tokens += 1
        self._tokens.append(token)
        assert state.logits is not None
        if self._take(token, state.logits, last):
            self.done, self._state = True, None
            final, held = (state, self._tokens[:-1]) if ahead is None else (ahead, self._tokens)
            cache.insert(held, final)
            return
        self._state = ahead if ahead is not None else engine.step(state, self._sampling)
        if self._constraint is not None:
            self._state = self._constraint.choose(self._state)

    def _take(self, token: int, logits: mx.array, last: bool) -> bool:
        """Emits what a token adds; returns whether it ends the answer."""
        ended, stopped, delta = token in self._eos_tokens, False, Delta()
        if not ended:
            delta, stopped = self._text.add(token)
            if self._constraint is not None:
                self._constraint.take(token, self._text.last_segment)
            if self._alternatives is not None:
                delta.logprobs.append(self._token_texts.logprobs(token, logits, self._alternatives))
        over = ended or stopped or last
        if over:
            rest = self._text.finish(complete=ended, stopped=stopped)
            delta.content += rest.content
            delta.reasoning += rest.reasoning
            delta.calls += rest.calls
        if delta or delta.logprobs:
            self._emit(delta)
        if over:
            reason = "tool_calls" if self._text.called else "stop" if ended or stopped else "length"
            size = len(self.prompt.tokens)
            self._emit(Finished(reason, size, size - self.computed_tokens, self.generated_tokens))
        return over


def _next_multiple(value: int, step: int) -> int:
    return (value // step + 1) * step
