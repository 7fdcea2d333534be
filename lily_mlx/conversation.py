"""`Conversation`: a chat whose turns cost only what is new, by snapshots of the state."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from lily_mlx.api import generate_step, stream_generate

if TYPE_CHECKING:
    from mlx_lm.generate import GenerationResponse


@dataclass(frozen=True)
class Snapshot:
    """The state of a sequence after its tokens, as mlx_lm's kind of prompt cache."""

    tokens: tuple[int, ...]
    cache: list[Any]


class Conversation:
    """Messages to a model and its answers.

    The whole conversation is rendered by the chat template at every turn, because templates change earlier turns
    (they drop what a model thought before). The longest snapshot whose tokens begin the new prompt is continued: a
    Gated DeltaNet state cannot go back. Snapshots are taken where the next turn can branch off: before the prompt's
    last lines, which ask for an answer, and after the answer.

    Args:
        model, tokenizer: from `lily_mlx.load`.
        system_prompt: the first message; None for none.
        template_options: keywords of the chat template.

    Attributes:
        messages: the conversation so far.
        prompt_tokens, reused_tokens: tokens of the last turn's prompt, and those that a snapshot held.
        prompt_seconds: time to the last turn's first token.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        system_prompt: str | None = None,
        template_options: dict[str, Any] | None = None,
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self._template_options = template_options or {}
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self.messages: list[dict[str, str]] = list(self._system)
        self.prompt_tokens = self.reused_tokens = 0
        self.prompt_seconds = 0.0
        self._snapshots: list[Snapshot] = []

    def ask(self, query: str, **options: Any) -> Iterator[GenerationResponse]:
        """Sends a message and yields the answer piece by piece.

        What came before an interruption (a closed iterator, Ctrl-C) is kept as the answer.

        Args:
            query: the message.
            options: keywords of `stream_generate`.
        """
        begin = time.perf_counter()
        messages = [*self.messages, {"role": "user", "content": query}]
        history, prompt = self._render(messages, False), self._render(messages, True)
        start = max(
            (s for s in self._snapshots if len(s.tokens) < len(prompt) and prompt[: len(s.tokens)] == list(s.tokens)),
            key=lambda snapshot: len(snapshot.tokens),
            default=Snapshot((), self._model.make_cache()),
        )
        self.prompt_tokens, self.reused_tokens = len(prompt), len(start.tokens)
        cache = copy.deepcopy(start.cache)
        branch = _common(history, prompt)
        taken = [start]
        if self.reused_tokens < branch < len(prompt):
            self._process(prompt[self.reused_tokens : branch], cache, options)
            taken.append(Snapshot(tuple(prompt[:branch]), copy.deepcopy(cache)))
        else:
            branch = self.reused_tokens
        pieces: list[str] = []
        tokens: list[int] = []
        responses = stream_generate(self._model, self._tokenizer, prompt[branch:], prompt_cache=cache, **options)
        try:
            for response in responses:
                if not tokens:
                    self.prompt_seconds = time.perf_counter() - begin
                pieces.append(response.text)
                tokens.append(response.token)
                yield response
        finally:
            responses.close()  # type: ignore[attr-defined]
            if tokens:
                self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
                taken.append(Snapshot((*prompt, *tokens), cache))
                self._snapshots = [snapshot for snapshot in taken if snapshot.tokens]

    def _render(self, messages: list[dict[str, str]], ask: bool) -> list[int]:
        if not self._tokenizer.has_chat_template:
            return list(self._tokenizer.encode("\n".join(message["content"] for message in messages) + "\n"))
        return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=ask, **self._template_options))

    def _process(self, tokens: list[int], cache: list[Any], options: dict[str, Any]) -> None:
        chunk = {name: value for name, value in options.items() if name == "prefill_step_size"}
        for _ in generate_step(mx.array(tokens, mx.uint32), self._model, max_tokens=0, prompt_cache=cache, **chunk):
            pass


def _common(first: list[int], second: list[int]) -> int:
    """Length of the common beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
