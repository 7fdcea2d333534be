"""What must never stop a server: bad bodies, dropped connections, odd values; and a GPU thread that dies."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from lily_mlx.server import disk_cache
from lily_mlx.server.disk_cache import DiskCache
from lily_mlx.server.worker import Limits

from .bodies import CHATS, COMPLETIONS, RAW
from .support import serving, wait_until

LINUX = os.path.isdir("/proc/self/fd")

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


def connect(server):
    return socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1])), timeout=30)


def request(**body):
    data = json.dumps({"messages": [{"role": "user", "content": "hello"}], **body}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data


ABANDONED = {
    "nothing": b"",
    "half-a-line": b"POST /v1/chat",
    "half-the-headers": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
    "half-a-body": request()[:-5],
    "no-http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a-whole-request": request(),
    "a-stream": request(stream=True),
    "two-requests": request() + request(stream=True),
}


def test_a_thousand_connections_that_are_dropped(server):
    """Abandoned at every stage, half of them with a reset. Nothing of them is left."""
    plain(server)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd")) if LINUX else 0
    for i in range(1000):
        with connect(server) as connection:
            data = list(ABANDONED.values())[i % len(ABANDONED)]
            connection.sendall(data)
            if i % 3 == 0 and data.endswith(b"}"):
                connection.recv(20)
            if i % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if i % 250 == 0:
            plain(server)
    wait_until(lambda: not (server.worker.running or server.worker.waiting), 60)
    plain(server)
    wait_until(lambda: threading.active_count() <= threads)
    if LINUX:
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files + 2)


def test_a_slow_reader_holds_up_nobody(server):
    """A stream of megabytes to a client that reads nothing for a while: others are served, and nothing is lost."""
    forbidden = {str(token): -1000 for token in server.worker.tokenizer.eos_token_ids}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", int(server.address.rsplit(":", 1)[1])))
        wish = {"stream": True, "n": 8, "max_tokens": 150, "logprobs": True, "top_logprobs": 20}
        connection.sendall(request(**wish, logit_bias=forbidden))
        wait_until(lambda: server.worker.running)
        plain(server)
        wait_until(lambda: not server.worker.running, 120)
        plain(server)
        received = b""
        while b"data: [DONE]" not in received[-100:]:
            received += connection.recv(1 << 16)
    assert len(received) > 10**6
    assert received.count(b'"finish_reason": "length"') == 8


def test_a_slow_reader_that_goes_away(server):
    forbidden = {str(token): -1000 for token in server.worker.tokenizer.eos_token_ids}
    with connect(server) as connection:
        connection.sendall(request(stream=True, n=4, max_tokens=4000, logit_bias=forbidden))
        wait_until(lambda: server.worker.running)
    wait_until(lambda: not server.worker.running)
    plain(server)


def test_a_body_that_comes_byte_by_byte(server):
    with connect(server) as connection:
        for byte in request():
            connection.sendall(bytes([byte]))
        assert b"200 OK" in connection.recv(1000)
    plain(server)


def test_a_content_length_that_is_no_number(server):
    with socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1]))) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    plain(server)


def test_huge_max_tokens(server):
    assert server.ask(max_tokens=10**18).json()["choices"][0]["message"]["content"] == TEXT


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=CHATS)
def test_after_any_chat_a_plain_one_gives_the_same(server, body):
    check_any(server, "/v1/chat/completions", body)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=COMPLETIONS)
def test_after_any_completion_a_plain_chat_gives_the_same(server, body):
    check_any(server, "/v1/completions", body)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=RAW)
def test_after_any_bytes_a_plain_chat_gives_the_same(server, data):
    assert send(server, data).status_code in (200, 400)
    plain(server)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=CHATS | COMPLETIONS, path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
def test_many_requests_and_plain_ones(server, body, path):
    check_any(server, path, body)


def check_any(server, path, body):
    """Answers are sound whatever the request; a limit of 2 tokens keeps them short."""
    for name in ("max_tokens", "max_completion_tokens"):
        if not isinstance(body.get(name), int) or body[name] > 4:
            body[name] = 2
    data = json.dumps(body).encode()
    answer = httpx.post(server.address + path, content=data, timeout=60)
    event(f"status {answer.status_code}")
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code == 200 and "text/event-stream" in answer.headers["content-type"]:
        parts = answer.text.split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        for part in parts[:-2]:
            assert "error" not in json.loads(part.removeprefix("data: "))
    elif answer.status_code == 200:
        assert all(choice["finish_reason"] for choice in answer.json()["choices"])
    else:
        assert answer.json()["error"]["message"]
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


def test_a_gpu_thread_that_dies_loses_no_request(tmp_path):
    """Those that run and those that wait all get an answer."""
    from tests.model.scripted import write_scripted

    write_scripted(tmp_path / "model", SCRIPT)
    with serving(tmp_path / "model", Limits(decode_concurrency=2)) as server:
        forbidden = {str(token): -1000 for token in server.worker.tokenizer.eos_token_ids}
        body = {"prompt": "x", "max_tokens": 10**6, "logit_bias": forbidden}
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(server.post, "/v1/completions", **body) for _ in range(6)]
            wait_until(lambda: server.worker.running == 2 and server.worker.waiting == 4)
            kill(server.worker)
            for answer in answers:
                assert answer.result().status_code == 503
                assert "GPU thread has ended" in answer.result().json()["error"]["message"]


def test_a_full_disk_harms_no_request(tmp_path, monkeypatch, caplog):
    from tests.model.scripted import write_scripted

    def write(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_cache, "write", write)
    write_scripted(tmp_path / "model", SCRIPT)
    with serving(tmp_path / "model", disk=DiskCache(tmp_path / "cache", 10**9, "model")) as server:
        for prompt in ("x" * 150 + "\n", "y" * 150 + "\n", "x" * 200 + "\n"):
            answer = server.post("/v1/completions", prompt=prompt)
            assert answer.json()["choices"][0]["text"] == TEXT
        wait_until(lambda: "lily_prefix_cache_disk_errors_total 1" in server.get("/metrics").text)
        assert server.get("/health").status_code == 200
        plain(server)
    assert sum("No space left" in record.getMessage() for record in caplog.records) == 1
