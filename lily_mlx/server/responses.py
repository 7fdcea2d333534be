"""Bodies of answers: whole, and as chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from .sequence import Finished
from .text import Delta, TokenLogprob
from .tools import ToolCall


def dumps(body: dict[str, Any]) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()


@dataclass
class Choice:
    """One choice, as far as it is known.

    Attributes:
        index: its number in the answer.
        prompt: number of the prompt that it answers.
        delta: everything so far.
        finished: how it ended.
    """

    index: int
    prompt: int
    delta: Delta = field(default_factory=Delta)
    finished: Finished | None = None
    began: bool = False
    calls: int = 0
    offset: int = 0

    def add(self, event: Delta | Finished) -> None:
        """Takes an event of its sequence."""
        if isinstance(event, Finished):
            self.finished = event
            return
        self.delta.content += event.content
        self.delta.reasoning += event.reasoning
        self.delta.calls += event.calls
        self.delta.logprobs += event.logprobs


class Responses:
    """Builds the bodies of one request's answer.

    Args:
        chat: which endpoint it is for.
        model: the name to repeat.
        choices: one for each prompt and choice.
        fingerprint: of the software and the device.
        with_logprobs: whether log-probabilities were asked for.
    """

    def __init__(self, chat: bool, model: str, choices: list[Choice], fingerprint: str, with_logprobs: bool):
        self._chat, self._choices, self._with_logprobs = chat, choices, with_logprobs
        self._kind = "chat.completion" if chat else "text_completion"
        self._base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self) -> dict[str, Any]:
        """The answer when every choice has finished."""
        return {
            **self._base,
            "object": self._kind,
            "choices": [self._whole_choice(choice) for choice in self._choices],
            "usage": self.usage(),
        }

    def chunks(self, choice: Choice, event: Delta | Finished) -> list[dict[str, Any]]:
        """The chunks that an event adds to a stream."""
        if not self._chat:
            if isinstance(event, Finished):
                return [self._chunk({"index": choice.index, "text": "", "finish_reason": event.reason, **self._none()})]
            parts = {"index": choice.index, "text": event.content, "finish_reason": None}
            return [self._chunk({**parts, **self._logprobs(choice, event.logprobs)})]
        deltas: list[dict[str, Any]] = []
        if not choice.began:
            choice.began = True
            deltas.append({"role": "assistant", "content": ""})
        reason, logprobs = None, self._none()
        if isinstance(event, Finished):
            reason = event.reason
            deltas.append({})
        else:
            if event.reasoning:
                deltas.append({"reasoning_content": event.reasoning})
            if event.content:
                deltas.append({"content": event.content})
            for call in event.calls:
                deltas += [{"tool_calls": [part]} for part in _call_parts(call, choice.calls)]
                choice.calls += 1
            if event.logprobs:
                logprobs = self._logprobs(choice, event.logprobs)
                if not event:
                    deltas.append({"content": ""})
        chunks = []
        for i, delta in enumerate(deltas):
            last = i == len(deltas) - 1
            rest = logprobs if last else self._none()
            chunks.append(
                self._chunk({"index": choice.index, "delta": delta, "finish_reason": reason if last else None, **rest})
            )
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that reports the usage."""
        return {**self._base, "object": self._chunk_kind, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts and choices; a prompt with several choices counts once."""
        first = {choice.prompt: choice.finished for choice in reversed(self._choices)}
        prompt = sum(end.prompt_tokens for end in first.values() if end)
        cached = sum(end.cached_tokens for end in first.values() if end)
        completion = sum(choice.finished.completion_tokens for choice in self._choices if choice.finished)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else self._kind

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._base, "object": self._chunk_kind, "choices": [choice]}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        assert choice.finished is not None
        delta = choice.delta
        result: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finished.reason}
        result.update(self._logprobs(choice, delta.logprobs))
        if not self._chat:
            return {**result, "text": delta.content}
        message: dict[str, Any] = {"role": "assistant", "content": delta.content}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["content"] = delta.content or None
            message["tool_calls"] = [_whole_call(call) for call in delta.calls]
        return {**result, "message": message}

    def _none(self) -> dict[str, Any]:
        return {"logprobs": None}

    def _logprobs(self, choice: Choice, tokens: list[TokenLogprob]) -> dict[str, Any]:
        if not self._with_logprobs:
            return self._none()
        if self._chat:
            content = [{**_entry(token), "top_logprobs": [_entry(a) for a in token.alternatives]} for token in tokens]
            return {"logprobs": {"content": content}}
        offsets = []
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += len(token.text)
        return {
            "logprobs": {
                "tokens": [token.text for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [{a.text: a.logprob for a in (*t.alternatives[::-1], t)} for t in tokens],
                "text_offset": offsets,
            }
        }


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"id": token.token, "token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _whole_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": "".join(call.fragments())}
    return {"id": _call_id(), "type": "function", "function": function}


def _call_parts(call: ToolCall, index: int) -> list[dict[str, Any]]:
    """A call as parts of a stream: its name, then its arguments one by one."""
    head = {"index": index, "id": _call_id(), "type": "function", "function": {"name": call.name, "arguments": ""}}
    return [head, *({"index": index, "function": {"arguments": text}} for text in call.fragments())]
