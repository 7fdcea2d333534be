"""What must never stop a server: bad bodies, dropped connections, odd values; and a GPU thread that dies."""

from __future__ import annotations

import ctypes
import json
import socket
import time

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .support import serving

SCRIPT = ("alpha", " beta", " gamma")
TEXT = "alpha beta gamma"


@pytest.fixture(scope="module")
def server(scripted):
    running = scripted(*SCRIPT)
    yield running
    plain(running)


def plain(server):
    """A plain request gives the text that it always gives, and the server says that it is well."""
    assert server.get("/health").status_code == 200
    answer = server.ask()
    assert answer.json()["choices"][0]["message"]["content"] == TEXT


def send(server, data, **headers):
    return httpx.post(f"{server.address}/v1/chat/completions", content=data, headers=headers, timeout=60)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="broken"),
        pytest.param(b"[]", id="a-list"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"messages": "\xe9"}', id="C45-latin-1"),
        pytest.param(b'{"messages": [{"role": "user", "content": "\\ud800 x"}]}', id="C45-half-a-surrogate-pair"),
        pytest.param(b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', id="C19-nan"),
        pytest.param(b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', id="C19-infinite"),
        pytest.param(b"[" * 100_000, id="nested-deeply"),
        pytest.param(b'{"seed": ' + b"9" * 5000 + b"}", id="long-number"),
    ],
)
def test_bad_bodies_get_400(server, data):
    answer = send(server, data)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    plain(server)


def test_a_byte_order_mark_is_accepted(server):
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    assert send(server, b"\xef\xbb\xbf" + body).status_code == 200


def test_c103_chunked_bodies_and_other_types(server):
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    assert send(server, iter([body[:10], body[10:]])).status_code == 200
    assert send(server, body, **{"content-type": "text/plain"}).status_code == 200


def test_large_bodies(server):
    assert send(server, b" " * 33_000_000).status_code == 413
    long = json.dumps({"messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode()
    assert send(server, b'{"junk": "' + b"x" * 10_000_000 + b'", "messages": []}').status_code == 400
    refused = send(server, long)
    assert refused.status_code == 400
    assert "characters" in refused.json()["error"]["message"]
    plain(server)


def test_many_connections_that_say_nothing(server):
    for i in range(200):
        with socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1]))) as connection:
            if i % 2:
                connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    plain(server)


def test_a_content_length_that_is_no_number(server):
    with socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1]))) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    plain(server)


def test_huge_max_tokens(server):
    assert server.ask(max_tokens=10**18).json()["choices"][0]["message"]["content"] == TEXT


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["x", 0, -1, 1e-40])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.just([{"role": "user", "content": "hello"}]) | st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool", "x"]), "content": VALUES}),
    max_size=3,
)
FIELDS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "seed",
    "n",
    "stop",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "max_tokens",
    "model",
    "response_format",
    "something_else",
]
SANE = {
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(0, 400),
    "xtc_probability": st.floats(0, 1),
    "repetition_penalty": st.floats(0, 5),
    "repetition_context_size": st.integers(0, 100),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3),
    "n": st.integers(1, 2),
    "stop": st.lists(st.text(max_size=3), max_size=2),
    "stream": st.booleans(),
}
BODIES = st.fixed_dictionaries(
    {"messages": MESSAGES},
    optional={name: (SANE[name] | VALUES) if name in SANE else VALUES for name in FIELDS},
)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=BODIES)
def test_after_any_request_a_plain_one_gives_the_same(server, body):
    limit = body.get("max_tokens")
    if not isinstance(limit, int) or limit > 4:
        body["max_tokens"] = 2
    answer = send(server, json.dumps(body).encode())
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code == 200 and "text/event-stream" in answer.headers["content-type"]:
        assert "data: [DONE]" in answer.text
        assert '"error"' not in answer.text
    else:
        assert answer.json()
    plain(server)


def kill(worker):
    """Ends the GPU thread with an exception that it does not handle."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(worker._thread.ident), ctypes.py_object(SystemExit)
    )


def test_a_gpu_thread_that_dies(tmp_path):
    from tests.model.scripted import write_scripted

    write_scripted(tmp_path / "model", SCRIPT)
    with serving(tmp_path / "model") as server:
        plain(server)
        forbidden = {str(token): -1000 for token in server.worker.tokenizer.eos_token_ids}
        body = {"prompt": "x", "stream": True, "max_tokens": 10**6, "logit_bias": forbidden}
        with httpx.stream("POST", f"{server.address}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            kill(server.worker)
            rest = list(lines)
        assert any("GPU thread has ended" in line for line in rest)
        assert rest[-2:] == ["data: [DONE]", ""]
        deadline = time.monotonic() + 10
        while server.get("/health").status_code != 503:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "GPU thread" in server.get("/health").json()["problem"]
        assert "lily_up 0" in server.get("/metrics").text
        for stream in (False, True):
            assert server.ask(stream=stream).status_code == 503
        assert server.get("/v1/models").status_code == 200
