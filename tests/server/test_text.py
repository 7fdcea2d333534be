"""Stop strings, channels and tool calls, whatever the borders of the pieces that they come in."""

from __future__ import annotations

import json

import pytest

from lily_mlx.server.reasoning import ChannelSplitter
from lily_mlx.server.stops import StopFinder
from lily_mlx.server.tools import parse_call, typed

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def pieces(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize(
    ("text", "stops", "left"),
    [
        pytest.param("abcabd!", ["abd"], "abc", id="after-a-false-start"),
        pytest.param("aaab!", ["aab"], "a", id="overlapping-itself"),
        pytest.param("abcd", ["abcd", "bc"], "a", id="first-to-be-complete"),
        pytest.param("xabc", ["abc", "bc"], "x", id="longer-of-two-at-once"),
        pytest.param("abcab", ["abd"], "abcab", id="unfinished-at-the-end"),
        pytest.param("\U0001f3f3\ufe0f!", ["\ufe0f"], "\U0001f3f3", id="scalar-of-a-grapheme"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 99])
def test_stops_do_not_depend_on_borders(text, stops, left, size):
    finder, passed, stopped = StopFinder(stops), "", False
    for piece in pieces(text, size):
        new, stopped = finder.feed(piece)
        passed += new
        if stopped:
            break
    assert passed + ("" if stopped else finder.finish()) == left
    assert stopped == any(stop in text for stop in stops)


CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
BARE = "<function=add>\n<parameter=a>\n7\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("text", "in_thought", "parts"),
    [
        pytest.param("hm\nso\n</think>\n\nYes.", True, {"reasoning": "hm\nso", "content": "Yes."}, id="open-thought"),
        pytest.param("<think>\na\n</think>\n\nb", False, {"reasoning": "a", "content": "b"}, id="own-thought"),
        pytest.param("<think>a</think>b<think>c</think>d", False, {"reasoning": "ac", "content": "bd"}, id="C73-two"),
        pytest.param("a</think>b", False, {"content": "a</think>b"}, id="stray-end"),
        pytest.param("no end", True, {"reasoning": "no end"}, id="thought-without-end"),
        pytest.param("1 < 2 <thi", False, {"content": "1 < 2 <thi"}, id="beginning-of-a-tag"),
        pytest.param(f"I will. {CALL}\n", False, {"content": "I will. ", "call": CALL}, id="C59-call"),
        pytest.param(f"Sure.\n{BARE}", False, {"content": "Sure.\n", "call": BARE}, id="C61-bare-call"),
        pytest.param(f"{CALL}\n{CALL}", False, {"call": CALL * 2}, id="two-calls"),
        pytest.param(f"{CALL}\nDone", False, {"call": CALL, "content": "\nDone"}, id="text-after-a-call"),
        pytest.param(f"why\n</think>\n\n{CALL}", True, {"reasoning": "why", "call": CALL}, id="thought-then-call"),
        pytest.param(
            CALL.replace("1", "<think>x</think></tool_call>"),
            False,
            {"call": CALL.replace("1", "<think>x</think></tool_call>")},
            id="C71-tags-inside-an-argument",
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 7, 999])
def test_channels_do_not_depend_on_borders(text, in_thought, parts, size):
    splitter, got = ChannelSplitter(True, in_thought, tools=True), {}
    for channel, part in [p for piece in pieces(text, size) for p in splitter.feed(piece)] + splitter.finish():
        got[channel] = got.get(channel, "") + part
    assert got == parts


def test_calls_are_text_without_tools():
    splitter = ChannelSplitter(True)
    assert [*splitter.feed(CALL), *splitter.finish()] == [("content", CALL)]


def arguments(text):
    call = parse_call(text, TOOLS)
    assert call is not None
    return call.name, json.loads("".join(call.fragments()))


def wrapped(body):
    return f"<tool_call>\n<function=add>\n{body}\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        pytest.param(CALL, "add", {"a": 1}, id="C59-plain"),
        pytest.param(BARE, "add", {"a": 7}, id="C61-bare"),
        pytest.param(
            wrapped("<parameter=s>\n\n    if x:\n        y\n\n</parameter>"),
            "add",
            {"s": "\n    if x:\n        y\n"},
            id="C63-one-line-break-is-layout",
        ),
        pytest.param(wrapped("<parameter=a>\n4"), "add", {"a": 4}, id="C65-end-missing"),
        pytest.param(
            wrapped("<parameter=a>\n4\n<parameter=s>\nx\n</parameter>"),
            "add",
            {"a": 4, "s": "x"},
            id="C65-end-missing-before-another",
        ),
        pytest.param("<tool_call>\n<function=now>\n</function>\n</tool_call>", "now", {}, id="C69-no-arguments"),
        pytest.param(wrapped("<parameter=s>\n<think>\n</parameter>"), "add", {"s": "<think>"}, id="C71-think"),
        pytest.param(
            '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>', "add", {"a": 3}, id="C75-json"
        ),
        pytest.param(wrapped('<parameter=s>\n"q" \u6f22\n</parameter>'), "add", {"s": '"q" \u6f22'}, id="quotes"),
    ],
)
def test_calls(text, name, values):
    assert arguments(text) == (name, values)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("<tool_call>\n2026-11-30\n</tool_call>", id="C67-not-a-call"),
        pytest.param('<tool_call>\n{"a": \n</tool_call>', id="broken-json"),
        pytest.param("<function=unknown>\n</function>", id="bare-and-unknown"),
    ],
)
def test_what_is_no_call(text):
    assert parse_call(text, TOOLS) is None


@pytest.mark.parametrize(
    ("value", "schema", "result"),
    [
        pytest.param("12", {"type": "integer"}, 12, id="integer"),
        pytest.param("12.0", {"type": "integer"}, 12, id="integer-as-float"),
        pytest.param("1.5", {"type": "integer"}, "1.5", id="no-integer"),
        pytest.param("1.5", {"type": "number"}, 1.5, id="number"),
        pytest.param("NaN", {"type": "number"}, "NaN", id="not-json"),
        pytest.param("True", {"type": "boolean"}, True, id="boolean"),
        pytest.param("1", {"type": "boolean"}, "1", id="no-boolean"),
        pytest.param("12", {"type": "string"}, "12", id="string"),
        pytest.param("12", None, "12", id="no-schema"),
        pytest.param("[1, 2]", {"type": "array"}, [1, 2], id="array"),
        pytest.param('{"a": 1}', {"type": "object"}, {"a": 1}, id="object"),
        pytest.param("null", {"type": ["string", "null"]}, None, id="null"),
        pytest.param("x", {"type": ["string", "null"]}, "x", id="string-or-null"),
        pytest.param("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 5, id="any-of"),
    ],
)
def test_types_of_arguments(value, schema, result):
    got = typed(value, schema)
    assert got == result
    assert type(got) is type(result)
