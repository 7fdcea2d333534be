"""The text of one answer, token by token: characters, stop strings, channels, tool calls, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from lily_mlx.detokenizer import ByteLevelDetokenizer, make_detokenizer

from .reasoning import ChannelSplitter, Part
from .stops import StopFinder
from .tools import ToolCall, parse_call

_LEAST = -9999.0  # stands for a probability of zero, which JSON has no number for


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability.

    Attributes:
        token, text, data: id, text and bytes.
        logprob: natural logarithm of the probability before temperature and filters.
        alternatives: the most likely tokens, best first.
    """

    token: int
    text: str
    data: bytes
    logprob: float
    alternatives: tuple[TokenLogprob, ...] = ()


@dataclass
class Delta:
    """What is new in an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class AnswerText:
    """Turns tokens into deltas.

    Args:
        tokenizer: mlx_lm's `TokenizerWrapper`.
        stops: stop strings; they count in everything that the model writes.
        splitter: of the channels; None where all text is content.
        tools: definitions of the tools that may be called.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        splitter: ChannelSplitter | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ):
        self._detokenizer = make_detokenizer(tokenizer)
        self._stops = StopFinder(stops)
        self._splitter = splitter
        self._tools = tools
        self.called = False
        self.last_segment = ""  # the text that the last token added

    def add(self, token: int) -> tuple[Delta, bool]:
        """Takes a token; returns what is new, and whether a stop string was found."""
        self._detokenizer.add_token(token)
        self.last_segment = self._detokenizer.last_segment
        return self._add(self.last_segment)

    def finish(self, complete: bool, stopped: bool = False) -> Delta:
        """Ends the answer.

        Args:
            complete: whether the model ended it; a tool call that a limit has cut off is given as text.
            stopped: whether a stop string ended it.
        """
        delta = Delta()
        if not stopped:
            self._detokenizer.finalize()
            delta, stopped = self._add(self._detokenizer.last_segment)
            if not stopped:
                self._split(self._stops.finish(), delta)
        if self._splitter is not None:
            self._take(self._splitter.finish(), delta, complete and not stopped)
        return delta

    def _add(self, text: str) -> tuple[Delta, bool]:
        text, stopped = self._stops.feed(text)
        delta = Delta()
        self._split(text, delta)
        return delta, stopped

    def _split(self, text: str, delta: Delta) -> None:
        if self._splitter is None:
            delta.content += text
        elif text:
            self._take(self._splitter.feed(text), delta, True)

    def _take(self, parts: Sequence[Part], delta: Delta, calls: bool) -> None:
        for channel, text in parts:
            call = parse_call(text, self._tools) if channel == "call" and calls else None
            if call is not None:
                delta.calls.append(call)
                self.called = True
            elif channel == "reasoning":
                delta.reasoning += text
            else:
                delta.content += text


class TokenTexts:
    """Text and bytes of single tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        detokenizer = make_detokenizer(tokenizer)
        self._bytes = detokenizer._bytes if isinstance(detokenizer, ByteLevelDetokenizer) else self._decoded

    def _decoded(self, token: int) -> bytes:
        return str(self._tokenizer.decode([token])).encode()

    def logprob(self, token: int, value: float, alternatives: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        data = self._bytes(token)
        return TokenLogprob(token, data.decode(errors="replace"), data, max(float(value), _LEAST), alternatives)

    def logprobs(self, token: int, logits: mx.array, count: int) -> TokenLogprob:
        """The log-probability of a token and of the `count` most likely ones.

        Args:
            logits: float32 [1, V].
        """
        values = np.array(logits[0], dtype=np.float64)
        values -= values.max()
        values -= np.log(np.exp(values).sum())
        best = np.argpartition(-values, min(count, values.size - 1))[:count] if count else np.zeros(0, int)
        best = best[np.argsort(-values[best], kind="stable")]
        return self.logprob(token, values[token], tuple(self.logprob(int(i), values[i]) for i in best))
