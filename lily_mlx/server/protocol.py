"""Requests of OpenAI's API: parsed, checked, and made into values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .constraints import Form
from .errors import RequestError
from .fields import Fields, bad, shown

MOST_CHOICES = 128
MOST_STOPS = 64
MOST_ALTERNATIVES = 20
MOST_RECENT = 65536


@dataclass(frozen=True)
class Defaults:
    """What requests get that do not say otherwise, from the command line."""

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        chat: whether it is a chat; otherwise a text to be completed.
        model: the name that it gave.
        messages, tools, template_options: of a chat.
        prompts: of a completion, each a text or token ids.
        call_tools: whether tool calls are looked for.
        form: that the answer must have; None for any.
        stream, include_usage: how to answer.
        choices: answers to each prompt.
        max_tokens: of each answer.
        stops: stop strings.
        alternatives: likely tokens to name at each position; None for no log-probabilities.
        seed: of the first choice; None for a random one.
        sampling: keywords of `lily_mlx.engine.make_sampling`, but the seed.
        ignored: fields without effect.
    """

    chat: bool
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_options: dict[str, Any]
    prompts: list[str | list[int]]
    call_tools: bool
    form: Form | None
    stream: bool
    include_usage: bool
    choices: int
    max_tokens: int
    stops: tuple[str, ...]
    alternatives: int | None
    seed: int | None
    sampling: dict[str, Any]
    ignored: tuple[str, ...]


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        RequestError: not UTF-8, not JSON, not an object, or with text that is not valid Unicode.
    """
    try:
        body = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise RequestError("the body has text with half of a surrogate pair: give valid Unicode") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is {shown(body)}: give a JSON object")
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def parse_request(body: dict[str, Any], chat: bool, defaults: Defaults, vocabulary: int) -> Request:
    """Checks a body.

    Args:
        body: the JSON object.
        chat: whether it came to the chat endpoint.
        defaults: of the server.
        vocabulary: tokens of the model.

    Raises:
        RequestError: a field is wrong.
    """
    fields = Fields(body)
    stream = fields.boolean("stream")
    choices = fields.integer("n", 1, 1, MOST_CHOICES) or 1
    tools, call_tools, form = _tools(fields) if chat else ([], False, None)
    request = Request(
        chat=chat,
        model=_model(fields),
        messages=_messages(fields) if chat else [],
        tools=tools,
        template_options=fields.mapping("chat_template_kwargs") if chat else {},
        prompts=[] if chat else _prompts(fields, vocabulary),
        call_tools=call_tools,
        form=_response_form(fields, tools, form),
        stream=stream,
        include_usage=_include_usage(fields),
        choices=choices,
        max_tokens=_max_tokens(fields, defaults),
        stops=_stops(fields),
        alternatives=_alternatives(fields, chat),
        seed=fields.integer("seed", None),
        sampling=_sampling(fields, defaults, vocabulary),
        ignored=(),
    )
    _refuse_others(fields, chat, choices)
    ignored = fields.unknown()
    if form is not None and _response_form(fields, tools, None) is not None:
        ignored.append("response_format")  # as with OpenAI: an answer of calls has no content that could have a form
    return Request(**{**vars(request), "ignored": tuple(ignored)})


def _model(fields: Fields) -> str:
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise bad("model", model, "give a name from /v1/models, or leave it out")
    return model or "default_model"


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages", messages, "give a list of at least one message")
    for message in messages:
        if not isinstance(message, dict):
            raise bad("messages", message, "give an object with a role and a content")
    return messages


def _prompts(fields: Fields, vocabulary: int) -> list[str | list[int]]:
    prompt = fields.get("prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
    prompts = prompt if several else [prompt]
    for item in prompts:
        if isinstance(item, str) and item:
            continue
        if not isinstance(item, list) or not item:
            raise bad("prompt", item, "give a text or a list of token ids, not empty, or a list of these")
        for token in item:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise bad("prompt", token, f"give token ids from 0 to {vocabulary - 1}")
    if len(prompts) > MOST_CHOICES:
        raise RequestError(f"prompt has {len(prompts)} items: give at most {MOST_CHOICES}", "prompt")
    return prompts


def _tools(fields: Fields) -> tuple[list[dict[str, Any]], bool, Form | None]:
    """The tools, whether calls are looked for, and the form of an answer that has to be a call."""
    tools = fields.get("tools")
    tools = [] if tools is None else tools
    if not isinstance(tools, list):
        raise bad("tools", tools, "give a list of tools")
    names = set()
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise bad("tools", tool, 'give {"type": "function", "function": {"name": ...}}')
        if tool.get("type", "function") != "function":
            raise bad("tools", tool["type"], 'the type of a tool must be "function"')
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise bad("tools", parameters, "the parameters of a function must be a JSON schema")
        names.add(function["name"])
    choice, several = fields.get("tool_choice"), fields.boolean("parallel_tool_calls", True)
    if choice in (None, "auto"):
        return tools, bool(tools), None
    if choice == "none":
        return [], False, None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise bad(
            "tool_choice", choice, 'give "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        )
    chosen = tuple(tool for tool in tools if choice == "required" or tool["function"]["name"] == name)
    if not chosen:
        raise bad("tool_choice", choice, "there is no such tool in tools")
    return tools, True, Form(None, chosen, several and choice == "required", "tool_choice")


def _response_form(fields: Fields, tools: list[dict[str, Any]], calls: Form | None) -> Form | None:
    """The form that an answer must have. Tools that may be called may also be called in place of JSON."""
    wish = fields.get("response_format")
    kind = wish.get("type") if isinstance(wish, dict) else wish
    if kind is None or kind == "text":
        return calls
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        described = wish.get("json_schema") if isinstance(wish, dict) else None
        schema = described.get("schema") if isinstance(described, dict) else None
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        raise bad(
            "response_format",
            wish,
            'give {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}',
        )
    return calls or Form(schema, tuple(tools), fields.boolean("parallel_tool_calls", True), "response_format")


def _include_usage(fields: Fields) -> bool:
    options = Fields(fields.mapping("stream_options"))
    try:
        return options.boolean("include_usage")
    except RequestError as error:
        raise RequestError(f"stream_options.{error.message}", "stream_options") from error


def _max_tokens(fields: Fields, defaults: Defaults) -> int:
    given = [fields.integer(name, None, 1) for name in ("max_completion_tokens", "max_tokens")]
    return next((value for value in given if value is not None), defaults.max_tokens)


def _stops(fields: Fields) -> tuple[str, ...]:
    stop = fields.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise bad("stop", stop, "give a text or a list of texts")
    if len(stops) > MOST_STOPS:
        raise RequestError(f"stop has {len(stops)} items: give at most {MOST_STOPS}", "stop")
    return tuple(item for item in stops if item)


def _alternatives(fields: Fields, chat: bool) -> int | None:
    if not chat:
        return fields.integer("logprobs", None, 0, MOST_ALTERNATIVES)
    wanted = fields.boolean("logprobs")
    alternatives = fields.integer("top_logprobs", None, 0, MOST_ALTERNATIVES)
    if alternatives is not None and not wanted:
        raise bad("top_logprobs", alternatives, "set logprobs to true as well, or leave it out")
    return (alternatives or 0) if wanted else None


def _sampling(fields: Fields, defaults: Defaults, vocabulary: int) -> dict[str, Any]:
    top_k = fields.integer("top_k", defaults.top_k, 0) or 0
    sampling: dict[str, Any] = {
        "temp": fields.number("temperature", defaults.temperature, 0, 1e6),
        "top_p": fields.number("top_p", defaults.top_p, 0, 1),
        "min_p": fields.number("min_p", defaults.min_p, 0, 1),
        "min_tokens_to_keep": fields.integer("min_tokens_to_keep", 1, 1, vocabulary),
        "top_k": top_k if top_k < vocabulary else 0,
        "xtc_probability": fields.number("xtc_probability", 0.0, 0, 1),
        "xtc_threshold": fields.number("xtc_threshold", 0.1, 0, 0.5),
        "logit_bias": _logit_bias(fields, vocabulary),
    }
    if sampling["temp"] < 1e-6:  # below it the best token is the only one
        sampling["temp"] = 0.0
    for name, low, high in (("repetition", 0, 1e6), ("presence", -1e6, 1e6), ("frequency", -1e6, 1e6)):
        sampling[f"{name}_penalty"] = fields.number(f"{name}_penalty", None, low, high)
        sampling[f"{name}_context_size"] = fields.integer(f"{name}_context_size", 20, 0, MOST_RECENT)
    return sampling


def _logit_bias(fields: Fields, vocabulary: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    values = Fields(fields.mapping("logit_bias"))
    for name in values.unknown():
        if not (name.isascii() and name.isdecimal() and len(name) < 12 and int(name) < vocabulary):
            raise bad("logit_bias", name, f"give token ids from 0 to {vocabulary - 1}")
        try:
            biases[int(name)] = values.number(name, 0.0, -1e6, 1e6) or 0.0
        except RequestError as error:
            raise RequestError(f"logit_bias: {error.message}", "logit_bias") from error
    return biases


def _refuse_others(fields: Fields, chat: bool, choices: int) -> None:
    """Fields whose effect would be missed."""
    for name in ("adapters", "draft_model"):
        value = fields.get(name)
        if value not in (None, "default_model"):
            raise bad(name, value, "one model is served, without adapters or draft models of single requests")
    if fields.get("role_mapping") is not None:
        raise RequestError("role_mapping is not supported: messages are rendered by the chat template", "role_mapping")
    if chat:
        return
    if fields.get("echo"):
        raise bad("echo", True, "the prompt is not repeated; leave it out")
    if fields.get("suffix"):
        raise bad("suffix", fields.get("suffix"), "text cannot be inserted; leave it out")
    if (fields.integer("best_of", choices, 1) or choices) != choices:
        raise bad("best_of", fields.get("best_of"), "answers are not ranked; leave it out")
