"""Tool calls in the forms that models of the family write, with arguments typed by the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .schemas import ANYTHING, KINDS, admitted, properties_of

_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_END = re.compile(r"</parameter>|(?=<parameter=)|</function>|</tool_call>")


@dataclass(frozen=True)
class ToolCall:
    """A parsed call: the function's name and the JSON text of each argument."""

    name: str
    arguments: Mapping[str, str]

    def fragments(self) -> list[str]:
        """JSON text of all arguments, cut between them."""
        if not self.arguments:
            return ["{}"]
        items = [f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in self.arguments.items()]
        pieces = ["{" + items[0], *(", " + item for item in items[1:])]
        pieces[-1] += "}"
        return pieces


def parse_call(text: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall | None:
    """Reads one call: Qwen's XML form, with or without its wrapper, or a JSON object inside the wrapper.

    An argument ends at its closing tag, or where the next tag of the form begins if that is missing. One line break
    on each side of a value is layout. A bare function block must name one of the tools.

    Args:
        text: from the first tag of the call on.
        tools: definitions as in the request.

    Returns:
        The call, or None if the text is none.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    function = _FUNCTION.search(text)
    if function is None:
        return _json_call(text)
    name = function[1].strip()
    if not text.startswith("<tool_call>") and name not in schemas:
        return None
    root = schemas.get(name, {})
    properties, _ = properties_of(root)
    arguments: dict[str, str] = {}
    position = function.end()
    while (parameter := _PARAMETER.search(text, position)) is not None:
        end = _END.search(text, parameter.end())
        stop, position = (end.start(), end.end()) if end else (len(text), len(text))
        value = text[parameter.end() : stop].removeprefix("\n").removesuffix("\n")
        key = parameter[1].strip()
        arguments[key] = json.dumps(typed(value, properties.get(key), root), ensure_ascii=False)
    return ToolCall(name, arguments)


def _json_call(text: str) -> ToolCall | None:
    inner = text.removeprefix("<tool_call>").strip().removesuffix("</tool_call>").strip()
    try:
        call = json.loads(inner)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(call["name"], {key: json.dumps(value, ensure_ascii=False) for key, value in arguments.items()})


def typed(value: str, schema: Any, root: Any = None) -> Any:
    """The value of an argument by its JSON schema; the text itself where it does not fit, or where the schema says nothing.

    Args:
        value: as the model wrote it.
        schema: of the parameter.
        root: schema of all parameters, where local references begin.
    """
    values = admitted(schema, schema if root is None else root)
    if values == ANYTHING or value in (values.texts or ()):
        return value
    for kind in KINDS:
        if kind not in values.kinds or (kind == "integer" and "number" in values.kinds):
            continue
        if kind == "string":
            return value
        try:
            parsed = json.loads(value.strip().lower() if kind in ("boolean", "null") else value, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
        if kind == "integer" and isinstance(parsed, float) and parsed.is_integer():
            parsed = int(parsed)
        if _is(kind, parsed):
            return parsed
    return value


def _is(kind: str, value: Any) -> bool:
    if kind == "null":
        return value is None
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, dict if kind == "object" else list)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
