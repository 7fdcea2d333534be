"""Schemas of parameters: what they admit, and what a required call may hold."""

from __future__ import annotations

import json

import pytest

from lily_mlx.checkpoints import bundled_checkpoint
from lily_mlx.server.constraints import Form, Grammars
from lily_mlx.server.schemas import ANYTHING, NOTHING, admitted, by_itself
from lily_mlx.server.tools import parse_call

ROOT = {
    "$defs": {
        "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]} | {"additionalProperties": False},
        "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1},
        "side": {"enum": ["left", "right"]},
        "circle": {"$ref": "#/$defs/circle"},
        "tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    },
    "definitions": {"a/b": {"const": 7}},
}  # fmt: skip


@pytest.fixture(scope="module")
def grammars():
    pytest.importorskip("llguidance")
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(bundled_checkpoint())
    return Grammars(tokenizer, max(tokenizer.get_vocab().values()) + 1)


CASES = {
    "type-list": ({"type": ["integer", "null"]}, {"5": 5, "null": None}, ["x", '"5"']),
    "any-of": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"5": 5, "null": None}, ["x"]),
    "one-of": ({"oneOf": [{"type": "boolean"}, {"type": "array"}]}, {"true": True, "[]": []}, ["x", "5"]),
    "enum-of-numbers": ({"enum": [1, 2.5]}, {"1": 1, "2.5": 2.5}, ["3", "x"]),
    "enum-of-all-kinds": ({"enum": ["a", 1, None, "2"]}, {"a": "a", "1": 1, "null": None, "2": "2"}, ['"a"', "b", "3"]),
    "const-number": ({"const": 7}, {"7": 7}, ["8", "x"]),
    "const-text": ({"const": "go on"}, {"go on": "go on"}, ["stop", '"go on"']),
    "reference": ({"$ref": "#/$defs/point"}, {'{"x": 5}': {"x": 5}}, ["x", '{"x": "y"}']),
    "array-of-references": ({"$ref": "#/$defs/points"}, {'[{"x": 5}]': [{"x": 5}]}, ["x", "[]", "[5]"]),
    "reference-inside": ({"type": "array", "items": {"$ref": "#/$defs/side"}}, {'["left"]': ["left"]}, ['["up"]']),
    "reference-to-texts": ({"$ref": "#/$defs/side"}, {"left": "left"}, ["up", '"left"']),
    "optional-reference": (
        {"anyOf": [{"$ref": "#/$defs/side"}, {"type": "null"}], "default": None},
        {"left": "left", "null": None},
        ["up", '"left"', "5"],
    ),
    "escaped-reference": ({"$ref": "#/definitions/a~1b"}, {"7": 7}, ["8"]),
    "recursive-reference": ({"$ref": "#/$defs/tree"}, {"[[], []]": [[], []]}, ["5", "[5]"]),
    "all-of": ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, {"5": 5}, ["x"]),
    "number": ({"type": "number"}, {"5.0": 5.0, "5": 5}, ["x"]),
    "text": ({"type": "string"}, {"x": "x", "5": "5", '"x"': '"x"'}, []),
    "text-or-null": ({"type": ["string", "null"]}, {"x": "x", "null": None}, []),
    "nothing-said": ({"description": "d"}, {"x": "x", "5": "5"}, []),
    "another-name": ({"type": "any"}, {"x": "x"}, []),
    "own-definitions": ({"$ref": "#/$defs/own", "$defs": {"own": {"type": "integer"}}}, {"5": 5}, ["x"]),
}


def text_of(value):
    return f"<tool_call>\n<function=f>\n<parameter=p>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("place", ["parameters", "behind-a-reference"])
def test_arguments_of_required_calls(grammars, schema, right, wrong, place):
    parameters = {"type": "object", "properties": {"p": schema}, "required": ["p"]}
    root = {**ROOT, **parameters}
    if place == "behind-a-reference":
        root = {"$ref": "#/$defs/all", **ROOT, "$defs": {**ROOT["$defs"], "all": parameters}}
    tool = {"type": "function", "function": {"name": "f", "parameters": root}}
    matcher = grammars.matcher(Form(None, (tool,), False, "tool_choice"), False)

    def allowed(value):
        follows = matcher.deep_copy()
        tokens = grammars.tokenize(text_of(value))
        return follows.try_consume_tokens(tokens) == len(tokens) and follows.is_accepting()

    assert {value: allowed(value) for value in (*right, *wrong)} == {
        **dict.fromkeys(right, True),
        **dict.fromkeys(wrong, False),
    }
    for value, meant in right.items():
        call = parse_call(text_of(value), [tool])
        assert json.loads(call.arguments["p"]) == meant
        assert type(json.loads(call.arguments["p"])) is type(meant)


@pytest.mark.parametrize(
    ("schema", "result"),
    [
        ({}, ANYTHING),
        (True, ANYTHING),
        (False, NOTHING),
        ({"$ref": "#/$defs/circle"}, NOTHING),
        ({"$ref": "#/nowhere"}, NOTHING),
        ({"$ref": "http://example.com/x"}, NOTHING),
        ({"type": "integer", "enum": ["a"]}, NOTHING),
    ],
    ids=lambda value: "anything" if value is ANYTHING else "nothing" if value is NOTHING else repr(value),
)
def test_edges(schema, result):
    assert admitted(schema, ROOT) == result


def test_many_paths_to_one_place_cost_nothing():
    options = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 3} for i in range(60)}
    root = {"$defs": {**options, "d60": {"type": "integer"}}}
    assert admitted({"$ref": "#/$defs/d31"}, root).kinds == {"integer"}
    assert len(by_itself({"$ref": "#/$defs/d0"}, root)["$defs"]) == 61
