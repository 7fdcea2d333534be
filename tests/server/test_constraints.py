"""Answers of a required form: JSON by a schema, and calls that must be made."""

from __future__ import annotations

import itertools
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from lily_mlx.checkpoints import bundled_checkpoint
from lily_mlx.server import constraints
from lily_mlx.server.protocol import Defaults, parse_request
from lily_mlx.server.reasoning import ChannelSplitter

from .support import serving

pytest.importorskip("llguidance")

NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["ghost", "king"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
WATCH = {
    "type": "function",
    "function": {
        "name": "watch",
        "parameters": {
            "type": "object",
            "properties": {
                "hour": {"type": "integer", "minimum": 1, "maximum": 12},
                "place": {"type": "string", "enum": ["gate", "wall"]},
            },
            "required": ["hour", "place"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def message(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def is_person(text):
    value = json.loads(text)
    assert list(value) == ["name", "age", "role"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert 0 <= value["age"] <= 120
    assert value["role"] in ("ghost", "king")
    return True


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"temperature": 1.5, "seed": 1}, id="temperature"),
        pytest.param({"temperature": 1.2, "top_p": 0.9, "top_k": 20, "seed": 2}, id="filters"),
        pytest.param({"repetition_penalty": 1.5, "logit_bias": {"7": 3}, "xtc_probability": 0.5}, id="penalties"),
    ],
)
def test_json_by_a_schema(tiny, options):
    answer = tiny.ask("Who is there?", response_format=JSON_SCHEMA, max_tokens=60, **NO_THOUGHT, **options)
    assert is_person(message(answer)["content"])
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    again = tiny.ask("Who is there?", response_format=JSON_SCHEMA, max_tokens=60, **NO_THOUGHT, **options)
    if "temperature" not in options or "seed" in options:
        assert message(again) == message(answer)


def test_a_stream_and_several_choices(tiny):
    options = {"response_format": JSON_SCHEMA, "max_tokens": 60, "n": 2, "temperature": 1.5, "seed": 5}
    messages = [{"role": "user", "content": "Who is there?"}]
    chunks = tiny.openai.chat.completions.create(
        model="tiny", messages=messages, stream=True, extra_body=NO_THOUGHT, **options
    )
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert all(is_person(text) for text in texts)
    assert texts[0] != texts[1]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "seed": 3, "top_p": 0.9}], ids=["greedy", "filters"])
def test_a_thought_cannot_end_the_text(scripted, options):
    """The model would end it there; the answer goes on until the limit, since nothing else closes the thought."""
    server = scripted("Hm", "m.", thinking=True)
    wish = {"response_format": {"type": "json_object"}, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    choice = server.ask(**wish, **options).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"].startswith("Hmm.")
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == 8
    for token in tokens:
        assert -1000 < token["logprob"] <= 0
        assert all(-1000 < other["logprob"] <= 0 for other in token["top_logprobs"])
        assert sum(math.exp(other["logprob"]) for other in token["top_logprobs"]) < 1.0001
    assert server.ask(max_tokens=8).json()["choices"][0]["finish_reason"] == "stop"


def test_any_json_object(tiny):
    answer = tiny.ask("x", response_format={"type": "json_object"}, max_tokens=40, **NO_THOUGHT)
    text = message(answer)["content"]
    assert text.lstrip().startswith("{")
    if answer.json()["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_thoughts_are_free(tiny):
    answer = tiny.ask("Who is there?", response_format=JSON_SCHEMA, max_tokens=80)
    assert is_person(message(answer)["content"])


THOUGHT = ("Hm", "m.", "\n</thi", 'nk>\n{"a"', ": 1", "2}")


def test_the_end_of_a_thought_inside_a_token(scripted):
    """What follows the tag in the same token counts for the form."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = message(scripted(*THOUGHT, thinking=True).ask(response_format=form))
    assert (answer["reasoning_content"], answer["content"]) == ("Hmm.", '{"a": 12}')


SAYS = {"type": "object", "properties": {"say": {"type": "string"}}, "required": ["say"], "additionalProperties": False}
CALL_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
TAGS = [CALL_NOW.replace("\n", ""), "</think> <think>x</think> <think>", "<function=now> <tool_call>"]


@pytest.mark.parametrize("tools", [[], [NOW]], ids=["json", "json-or-calls"])
@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "after-a-thought"])
@pytest.mark.parametrize("tag", TAGS)
def test_tags_inside_json_are_text(scripted, tools, thinking, tag):
    text = json.dumps({"say": f"a {tag} b"})
    script = ["Hm", "m.\n</think>\n\n", text] if thinking else [text]
    form = {"type": "json_schema", "json_schema": {"schema": SAYS}}
    answer = message(scripted(*script, thinking=thinking).ask(response_format=form, tools=tools))
    assert answer["content"] == text
    assert not answer.get("tool_calls")
    assert answer.get("reasoning_content", "") == ("Hmm." if thinking else "")


@pytest.mark.parametrize("cut", [1, 5, 100])
@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "after-a-thought"])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (CALL_NOW, [("call", CALL_NOW)]),
        (f"{CALL_NOW}\n{CALL_NOW}", [("call", CALL_NOW), ("call", CALL_NOW)]),
        (f'{{"a": "{CALL_NOW}"}}', [("content", f'{{"a": "{CALL_NOW}"}}')]),
        ("<tool", [("content", "<tool")]),
        ("", []),
    ],
    ids=["a-call", "two-calls", "json", "cut-off", "nothing"],
)
def test_the_beginning_decides_what_an_answer_is(text, parts, thinking, cut):
    splitter = ChannelSplitter(thinking, thinking, tools=True, formed=True)
    whole = ("Hm</think>\n\n" if thinking else "") + text
    found = [part for i in range(0, len(whole), cut) for part in splitter.feed(whole[i : i + cut])] + splitter.finish()
    joined = [
        (channel, "".join(text for _, text in run)) if channel != "call" else list(run)
        for channel, run in itertools.groupby(found, key=lambda part: part[0])
    ]
    flat = [item for one in joined for item in (one if isinstance(one, list) else [one])]
    assert flat == [("reasoning", "Hm")] * thinking + parts


def test_the_openai_client_parses(tiny):
    pydantic = pytest.importorskip("pydantic")

    class Answer(pydantic.BaseModel):
        yes: bool

    parsed = tiny.openai.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "Who is there?"}],
        response_format=Answer,
        max_tokens=30,
        extra_body=NO_THOUGHT,
    )
    assert parsed.choices[0].message.parsed.yes in (True, False)


def test_completions_too(tiny):
    answer = tiny.post("/v1/completions", prompt="My lord", response_format=JSON_SCHEMA, max_tokens=60).json()
    assert is_person(answer["choices"][0]["text"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "watch"}}], ids=["required", "named"]
)
def test_a_call_that_must_be_made(tiny, choice, stream):
    messages = [{"role": "user", "content": "Who is there?"}]
    options = {"model": "tiny", "messages": messages, "tools": [WATCH], "tool_choice": choice, "max_tokens": 80}
    options |= {"parallel_tool_calls": False, "extra_body": NO_THOUGHT}
    if stream:
        with tiny.openai.chat.completions.stream(**options) as events:
            answer = events.get_final_completion().choices[0]
    else:
        answer = tiny.openai.chat.completions.create(**options).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "watch"
    arguments = json.loads(call.function.arguments)
    assert 1 <= arguments["hour"] <= 12
    assert arguments["place"] in ("gate", "wall")
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content


def test_a_required_call_beside_a_response_format(tiny):
    """As with OpenAI the call counts: there is no content that could have a form. The answer says so."""
    options = {"tools": [WATCH], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80}
    answer = tiny.ask("x", response_format=JSON_SCHEMA, **options, **NO_THOUGHT)
    assert [call["function"]["name"] for call in message(answer)["tool_calls"]] == ["watch"]
    assert "response_format" in answer.headers["warning"]
    for without in ({}, {"response_format": {"type": "text"}}):
        assert "warning" not in tiny.ask("x", **without, **options, **NO_THOUGHT).headers


@pytest.mark.parametrize("parallel", [False, True, None])
def test_parallel_calls_in_place_of_json(parallel):
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [WATCH], "response_format": JSON_SCHEMA}
    request = parse_request({**body, "parallel_tool_calls": parallel}, True, Defaults(), 2048)
    assert request.form is not None
    assert request.form.several == (parallel is not False)


def test_one_of_several_tools(tiny):
    named = {"type": "function", "function": {"name": "now"}}
    answer = tiny.ask("x", tools=[WATCH, NOW], tool_choice=named, max_tokens=60, **NO_THOUGHT)
    (call,) = message(answer)["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("now", "{}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("response_format", "json", id="a-string"),
        pytest.param("response_format", {"type": "xml"}, id="another-type"),
        pytest.param("response_format", {"type": "json_schema"}, id="no-schema"),
        pytest.param("response_format", {"type": "json_schema", "json_schema": {"schema": 5}}, id="schema-is-a-number"),
        pytest.param("tool_choice", "required", id="required-without-tools"),
        pytest.param("tool_choice", {"type": "function", "function": {"name": "f"}}, id="an-unknown-tool"),
        pytest.param("tool_choice", {"function": 5}, id="a-bad-choice"),
    ],
)
def test_what_is_no_form(tiny, field, value):
    answer = tiny.ask("x", **{field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"type": "objekt"}, id="unknown-type"),
        pytest.param({"$ref": "http://example.com/x"}, id="remote-reference"),
        pytest.param({"not": {"type": "string"}}, id="keyword-without-support"),
        pytest.param({"type": "string", "pattern": "("}, id="broken-pattern"),
        pytest.param(nested(300), id="deep"),
        pytest.param({"type": "object", "properties": 5}, id="wrong-properties"),
        pytest.param({"type": "integer", "minimum": 5, "maximum": 1}, id="impossible"),
    ],
)
def test_schemas_that_cannot_be_enforced(tiny, schema):
    answer = tiny.ask("x", response_format={"type": "json_schema", "json_schema": {"schema": schema}}, max_tokens=2)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "response_format"
    assert tiny.get("/health").status_code == 200


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"type": "string", "maxLength": 10**9}, id="long"),
        pytest.param({"type": "array", "items": {"type": "integer"}, "minItems": 10**7}, id="many"),
        pytest.param({"type": "string", "pattern": "(a|a)*(a|b){1000}" * 3}, id="costly-pattern"),
        pytest.param({"enum": [str(i) for i in range(20000)]}, id="many-values"),
        pytest.param({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, id="a-circle"),
        pytest.param({"$ref": "#"}, id="itself"),
    ],
)
def test_costly_schemas_end_in_an_answer(tiny, schema):
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = tiny.ask("x", response_format=form, max_tokens=3, **NO_THOUGHT)
    assert answer.status_code in (200, 400, 500), answer.text
    assert tiny.get("/health").status_code == 200
    assert tiny.ask("x", max_tokens=1).status_code == 200


def test_tokens_of_a_text_from_several_threads(tiny, monkeypatch):
    """The library's tokenizer is made once, whoever is first."""
    import llguidance.hf

    made, make = [], llguidance.hf.from_tokenizer

    def slow(*args, **options):
        made.append(1)
        time.sleep(0.2)
        return make(*args, **options)

    monkeypatch.setattr(llguidance.hf, "from_tokenizer", slow)
    grammars = constraints.Grammars(tiny.worker.tokenizer, tiny.worker.model.config.vocab_size)
    with ThreadPoolExecutor(4) as pool:
        tokens = list(pool.map(grammars.tokenize, ["To be, or not to be"] * 8))
    assert made == [1]
    assert all(one == tokens[0] for one in tokens)
    assert tiny.worker.tokenizer.decode(tokens[0]) == "To be, or not to be"


def test_a_panic_of_the_library_ends_one_answer(tiny, monkeypatch):
    class Panic(BaseException):
        pass

    def choose(*_):
        return constraints._contained(lambda: (_ for _ in ()).throw(Panic("broken")))

    with monkeypatch.context() as patch:
        patch.setattr(constraints.Constraint, "choose", choose)
        answer = tiny.ask("x", response_format=JSON_SCHEMA, max_tokens=3, **NO_THOUGHT)
    assert answer.status_code == 500
    assert "llguidance failed" in answer.json()["error"]["message"]
    assert tiny.ask("x", max_tokens=1).status_code == 200


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with serving(bundled_checkpoint()) as server:
        with pytest.raises(openai.BadRequestError, match="not installed"):
            server.openai.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], response_format={"type": "json_object"}
            )
        assert server.ask("x", max_tokens=1).status_code == 200
