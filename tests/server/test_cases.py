"""Cases from the field over HTTP that no other file of this directory covers; docs/drop_in.md lists all of them."""

from __future__ import annotations

import http.client
import json
import math
import time

import httpx
import pytest
from mlx_lm.utils import load_tokenizer

from lily_mlx.checkpoints import bundled_checkpoint
from lily_mlx.server import app
from lily_mlx.server.errors import RequestError
from lily_mlx.server.prompts import make_prompts
from lily_mlx.server.protocol import Defaults, parse_request
from lily_mlx.server.worker import Limits

from .support import serving

SCRIPT = ("alpha", " beta", " gamma")
QUESTION = {"role": "user", "content": "Who is there?"}


@pytest.fixture(scope="module")
def server(scripted):
    return scripted(*SCRIPT)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(bundled_checkpoint())


def rendered(tokenizer, messages, **body) -> str:
    """The text of a chat's prompt."""
    request = parse_request({"messages": messages, **body}, True, Defaults(), 2048)
    (made,) = make_prompts(request, tokenizer, {})
    return tokenizer.decode(made.tokens)


def events(server, **body) -> list[str]:
    """The data of each event of a stream, as it came."""
    lines = server.ask(stream=True, **body).text.split("\n")
    assert all(not line or line.startswith(("data: ", ": ")) for line in lines)
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("message", [{"content": "x"}, {"role": None, "content": "x"}, {"role": 5, "content": "x"}])
def test_c47_roles_that_are_none(tokenizer, message):
    with pytest.raises(RequestError, match="role of a message must be one of") as error:
        rendered(tokenizer, [message])
    assert error.value.status == 400


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"text": "no type"},
        "a string",
    ],
    ids=lambda part: part.get("type", "none") if isinstance(part, dict) else "string",
)
@pytest.mark.parametrize("place", [0, 1])
def test_c49_parts_that_are_no_text(server, part, place):
    parts = [{"type": "text", "text": "What is this?"}]
    parts.insert(place, part)
    answer = server.post(messages=[{"role": "user", "content": parts}])
    assert answer.status_code == 400
    kind = part.get("type") if isinstance(part, dict) else part
    assert str(kind) in answer.json()["error"]["message"]


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("content", ["", None, "Let me add."])
def test_c55_every_thought_of_the_history_is_closed(tokenizer, content, name, preserve):
    turn = {"role": "assistant", "content": content, name: "I should add.", "tool_calls": [CALL]}
    messages = [QUESTION, turn, {"role": "tool", "content": "3", "tool_call_id": "1"}]
    for history in (messages, [*messages, {"role": "assistant", "content": "3"}, QUESTION]):
        options = {"chat_template_kwargs": {"preserve_thinking": preserve}}
        text = rendered(tokenizer, history, **options)
        finished, _, asked = text.rpartition("<|im_start|>assistant")
        assert finished.count("<think>") == finished.count("</think>")
        assert "<think>" in asked
        if preserve or history is messages:
            assert "<think>\nI should add.\n</think>" in finished


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 4),
        ({"max_tokens": None}, 4),
        ({"max_completion_tokens": None, "max_tokens": 2}, 2),
        ({"max_completion_tokens": 3}, 3),
        ({"max_completion_tokens": 1, "max_tokens": None}, 1),
    ],
    ids=str,
)
def test_c93_max_tokens(server, options, count):
    assert server.ask(**options).json()["usage"]["completion_tokens"] == count


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, "5", 5.0, False, [5]], ids=repr)
def test_c93_what_is_no_count(server, name, value):
    answer = server.ask(**{name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("options", "reports"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": None}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_c95_stream_options(server, path, options, reports):
    body = {"prompt": "x\n"} if path == "/v1/completions" else {"messages": [QUESTION]}
    text = server.post(path, stream=True, stream_options=options, **body).text
    *chunks, last = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert last == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    kind = "text_completion" if path == "/v1/completions" else "chat.completion.chunk"
    assert {chunk["object"] for chunk in chunks} == {kind}
    usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert [chunk["choices"] for chunk in usage] == [[]] * reports
    if reports:
        assert chunks[-1] is usage[0] or chunks[-1] == usage[0]


@pytest.mark.parametrize("options", ["x", [1], 5, {"include_usage": "true"}, {"include_usage": 1}], ids=str)
@pytest.mark.parametrize("stream", [True, False])
def test_c95_wrong_types(server, options, stream):
    assert server.ask(stream=stream, stream_options=options).status_code == 400


@pytest.mark.slow
def test_c97_comments_while_a_long_prompt_is_processed(monkeypatch):
    monkeypatch.setattr(app, "KEEP_ALIVE_SECONDS", 0.05)
    with serving(bundled_checkpoint(), Limits(chunk_size=8, cache_bytes=0)) as slow:
        body = {"prompt": [5, 6, 7, 8] * 150, "max_tokens": 2}
        with httpx.stream(
            "POST", f"{slow.address}/v1/completions", json={**body, "stream": True}, timeout=120
        ) as answer:
            times, lines = [], []
            for line in answer.iter_lines():
                times.append(time.monotonic())
                lines.append(line)
        comments = [line for line in lines if line.startswith(":")]
        assert len(comments) >= 2
        assert lines[0].startswith(":")
        assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
        joined = "".join(
            json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            for line in lines
            if line.startswith("data: {")
        )
        whole = slow.post("/v1/completions", **body)
        assert whole.text.startswith("{")
        assert whole.json()["choices"][0]["text"] == joined


@pytest.mark.parametrize("count", [0, 2, 20])
def test_c99_alternatives(server, count):
    entries = server.ask(logprobs=True, top_logprobs=count).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries][: len(SCRIPT)] == list(SCRIPT)
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        found = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(found) == count
        assert found == sorted(found, reverse=True)
        if count:
            assert entry["token"] in [top["token"] for top in entry["top_logprobs"]]


@pytest.mark.parametrize("count", [0, 2])
def test_c99_alternatives_of_a_completion(server, count):
    answer = server.post("/v1/completions", prompt="x\n", logprobs=count).json()["choices"][0]["logprobs"]
    assert answer["tokens"][: len(SCRIPT)] == list(SCRIPT)
    assert all(len(top or {}) >= count for top in answer["top_logprobs"] or [])


def test_c99_forbidden_tokens_have_finite_logprobs(server):
    forbidden = dict.fromkeys(map(str, range(1, 300)), -1e6)
    text = server.ask(logprobs=True, top_logprobs=20, max_tokens=1, logit_bias=forbidden).text
    (entry,) = json.loads(text, parse_constant=pytest.fail)["choices"][0]["logprobs"]["content"]
    assert all(math.isfinite(top["logprob"]) for top in entry["top_logprobs"])


@pytest.mark.parametrize(
    "options", [{"logprobs": True, "top_logprobs": value} for value in (-1, 21, "2", 2.0)], ids=str
)
def test_c99_what_is_no_count(server, options):
    assert server.ask(**options).status_code == 400


def test_c103_one_connection_for_several_requests(server):
    host = server.address.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    body = json.dumps({"messages": [QUESTION]})
    sockets = set()
    for path in ("/v1/chat/completions", "/nowhere", "/v1/chat/completions"):
        connection.request("POST", path, body)
        answer = connection.getresponse()
        answer.read()
        sockets.add(connection.sock)
        assert answer.version == 11
        assert answer.status == (404 if path == "/nowhere" else 200)
    assert len(sockets) == 1
    connection.close()


def test_c103_no_length_and_no_body(server):
    host = server.address.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()
    assert server.ask().status_code == 200
