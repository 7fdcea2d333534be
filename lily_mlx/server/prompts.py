"""Prompts: messages rendered by the chat template, token ids, and the places where later prompts branch off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .fields import bad
from .protocol import Request

_ROLES = ("system", "user", "assistant", "tool")
_TURN = "<|im_start|>"
_RESERVED = ("tokenize", "add_generation_prompt", "continue_final_message", "tools", "messages", "conversation")


@dataclass(frozen=True)
class Prompt:
    """A prompt for the engine.

    Attributes:
        tokens: token ids.
        borders: lengths at which a snapshot is worth keeping, ascending.
        in_thought: whether it ends inside a think block.
    """

    tokens: list[int]
    borders: tuple[int, ...]
    in_thought: bool = False


def make_prompts(
    request: Request, tokenizer: Any, template_options: dict[str, Any], most_characters: int | None = None
) -> list[Prompt]:
    """The prompts of a request.

    Args:
        request: a checked request.
        tokenizer: mlx_lm's `TokenizerWrapper`.
        template_options: the server's options of the chat template; those of the request replace them.
        most_characters: a longer text is refused without the time that its tokens would take; None for no limit.

    Raises:
        RequestError: the messages do not fit the template, or a text is too long.
    """
    if most_characters is not None:
        _check_length(request, most_characters)
    if request.chat:
        return [_chat_prompt(request, tokenizer, template_options)]
    return [_text_prompt(prompt, tokenizer) for prompt in request.prompts]


def _check_length(request: Request, most: int) -> None:
    texts = [json.dumps(request.messages, ensure_ascii=False)] if request.chat else request.prompts
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > most:
        raise RequestError(
            f"the prompt has {longest} characters, and no more than {most} can fit the model's context: shorten it",
            "messages" if request.chat else "prompt",
        )


def _text_prompt(prompt: str | list[int], tokenizer: Any) -> Prompt:
    tokens = prompt
    if isinstance(tokens, str):
        special = tokenizer.bos_token is None or not tokens.startswith(tokenizer.bos_token)
        tokens = list(tokenizer.encode(tokens, add_special_tokens=special))
    # The same prompt again, or one that continues it, needs only its last token.
    return Prompt(tokens, (len(tokens) - 1,) if len(tokens) > 1 else ())


def _chat_prompt(request: Request, tokenizer: Any, template_options: dict[str, Any]) -> Prompt:
    if not tokenizer.has_chat_template:
        raise RequestError("the model's tokenizer has no chat template: use /v1/completions", "messages")
    options = {**template_options, **request.template_options}
    for name in options:
        if name in _RESERVED:
            raise RequestError(f"chat_template_kwargs cannot set {name}: the server does", "chat_template_kwargs")
    messages = [_message(message) for message in request.messages]
    if request.tools:
        options["tools"] = request.tools
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except Exception as error:  # a template can raise anything
        raise RequestError(f"the chat template refuses the messages: {error}", "messages") from error
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    return Prompt(tokens, _borders(tokens, tokenizer, messages), text.rstrip().endswith("<think>"))


def _borders(tokens: Sequence[int], tokenizer: Any, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Where the next prompts leave this one: after the system message, before the last question, before the answer."""
    mark = tokenizer.get_vocab().get(_TURN)
    starts = [i for i, token in enumerate(tokens) if token == mark]
    if not starts:
        return (len(tokens) - 1,) if len(tokens) > 1 else ()
    borders = set(starts[-2:])
    if messages[0]["role"] == "system" and len(starts) > 1:
        borders.add(starts[1])
    return tuple(sorted(border for border in borders if border))


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message in the form that templates read."""
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise bad("messages", role, f"the role of a message must be one of {', '.join(_ROLES)}, developer")
    result = {**message, "role": role, "content": _content(message.get("content"))}
    calls = message.get("tool_calls")
    if calls is None:
        result.pop("tool_calls", None)
    elif not isinstance(calls, list):
        raise bad("messages", calls, "tool_calls must be a list")
    else:
        result["tool_calls"] = [_call(call) for call in calls]
    return result


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad("messages", content, "the content of a message must be a text or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in ("text", "input_text"):
            raise bad("messages", kind, "this model reads only content parts of type text")
        if not isinstance(part.get("text"), str):
            raise bad("messages", part, "a content part of type text needs a text")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any) -> dict[str, Any]:
    """A tool call of an earlier answer, its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad("messages", call, "a tool call needs a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise bad("messages", arguments, f"the arguments of a tool call are not JSON ({error})") from error
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise bad("messages", arguments, "the arguments of a tool call must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}
