"""Several requests at once: equal texts, cancellation, back-pressure, isolation, the end."""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from lily_mlx import load
from lily_mlx.checkpoints import bundled_checkpoint
from lily_mlx.engine import Engine
from lily_mlx.server.worker import Limits, Worker

from .support import serving, started, wait_until

SCRIPT = ("alpha", " beta", " gam", "ma", " delta", " eps")
TEXT = "".join(SCRIPT)


def message(text):
    return [{"role": "user", "content": text}]


def completed(server, prompt, **options):
    return server.post("/v1/completions", prompt=prompt, **options).json()["choices"][0]["text"]


def streamed(server, prompt, **options):
    chunks = server.openai.completions.create(model="tiny", prompt=prompt, stream=True, **options)
    return "".join(chunk.choices[0].text for chunk in chunks)


@pytest.mark.slow  # tests/server/test_openai_client.py has the same over chats
def test_sixteen_streams_equal_sequential_requests(tiny):
    prompts = [[100 + 7 * i, 50 + i, 9] for i in range(16)]
    lengths = [2 + i % 3 for i in range(16)]
    alone = [completed(tiny, p, max_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    tiny.worker.cache.clear()
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda p, n: streamed(tiny, p, max_tokens=n), prompts, lengths))
    assert together == alone
    assert len(set(alone)) > 4


def test_answers_advance_together(tiny, monkeypatch):
    """Sixteen streams of several lengths and samplings, most of them in common steps, and each as if alone."""
    rows, real = [], type(tiny.worker.model).batch_step

    def batch_step(model, tokens, *rest):
        rows.append(tokens.size)
        return real(model, tokens, *rest)

    monkeypatch.setattr(type(tiny.worker.model), "batch_step", batch_step)
    wishes = [
        {"prompt": [100 + 7 * i, 50 + i, 9] * (1 + 9 * (i % 3)), "max_tokens": 4 + i % 5, "logprobs": 2}
        | ({"temperature": 0.8, "seed": i, "top_p": 0.9} if i % 4 == 1 else {})
        | ({"presence_penalty": 0.7, "logit_bias": {"7": 2.0}} if i % 4 == 2 else {})
        for i in range(16)
    ]

    def answer(wish):
        choice = tiny.post("/v1/completions", **wish).json()["choices"][0]
        return choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]

    alone = [answer(wish) for wish in wishes]
    assert not rows
    tiny.worker.cache.clear()
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(answer, wishes)) == alone
    assert max(rows) >= 4
    rows.clear()
    assert answer(wishes[3]) == alone[3]  # from the snapshots that the common steps left
    assert not rows


def test_c23_each_request_has_its_own_sampling(tiny):
    prompt = "Speak to me, speak to me."
    wishes = [
        {"max_tokens": 6},
        {"max_tokens": 6, "repetition_penalty": 1.8},
        {"max_tokens": 4, "logit_bias": {"7": 50}},
        {"max_tokens": 5, "temperature": 1.0, "top_p": 0.5, "seed": 3},
    ]
    alone = [completed(tiny, prompt, **wish) for wish in wishes]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda wish: completed(tiny, prompt, **wish), wishes)) == alone
    assert len(set(alone)) == 4


@pytest.fixture(scope="module")
def small_chunks():
    with serving(bundled_checkpoint(), Limits(chunk_size=8, cache_bytes=0)) as server:
        yield server


def test_a_stream_goes_on_while_a_long_prompt_is_processed(small_chunks):
    server = small_chunks
    chunks = server.openai.completions.create(model="tiny", prompt="My", stream=True, max_tokens=40)
    next(chunks)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(completed, server, [9] * 80, max_tokens=1)
        wait_until(lambda: server.worker.running == 2)
        before = [next(chunks) for _ in range(4)]
        assert not long.done()
        chunks.close()
        assert long.result() is not None
    assert len(before) == 4


def test_c91_a_client_that_goes_away_during_the_prompt(small_chunks):
    server = small_chunks
    computed = server.worker.computed_tokens
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.address}/v1/completions", json={"prompt": [9] * 20000}, timeout=0.5)
    wait_until(lambda: server.worker.running == 0)
    assert 0 < server.worker.computed_tokens - computed < 1000
    assert completed(server, "My", max_tokens=1)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_c91_a_client_that_goes_away_ends_the_work(tiny, stream):
    body = {"prompt": "My lord", "max_tokens": 2000, "stream": stream, "logit_bias": {"2002": -100, "2000": -100}}
    generated = tiny.worker.generated_tokens
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream("POST", f"{tiny.address}/v1/completions", json=body, timeout=2) as answer,
    ):
        next(answer.iter_raw())
    wait_until(lambda: tiny.worker.running == 0)
    assert tiny.worker.generated_tokens - generated < 500
    assert tiny.get("/health").json()["status"] == "ok"


def test_a_cancelled_answer_holds_no_memory(tiny):
    """Whoever still refers to it, such as a task that has not been collected yet."""
    chunks = tiny.openai.completions.create(model="tiny", prompt="My", stream=True, max_tokens=300)
    next(chunks)
    (answer,) = tiny.worker._active
    assert answer._state is not None
    chunks.close()
    wait_until(lambda: tiny.worker.running == 0)
    assert answer._state is None
    assert answer._pending == []


def test_health_answers_while_generating(tiny):
    chunks = tiny.openai.completions.create(model="tiny", prompt="My", stream=True, max_tokens=30)
    next(chunks)
    health = tiny.get("/health").json()
    assert (health["status"], health["running"]) == ("ok", 1)
    chunks.close()


def test_back_pressure():
    with serving(bundled_checkpoint(), Limits(decode_concurrency=1, waiting=1)) as server:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(completed, server, "My", max_tokens=30)
            wait_until(lambda: server.worker.running == 1)
            second = pool.submit(completed, server, "lord", max_tokens=1)
            wait_until(lambda: server.worker.waiting == 1)
            refused = server.post("/v1/completions", prompt="x")
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
            with pytest.raises(openai.RateLimitError):
                server.openai.chat.completions.create(model="tiny", messages=message("x"))
            assert first.result()
            assert second.result()
        assert completed(server, "My", max_tokens=1)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_failed_answer_harms_no_other(scripted, monkeypatch, stream):
    server = scripted(*SCRIPT)
    real, failing, together = type(server.worker.model).step, [], []
    admit = type(server.worker)._admit

    def step(model, token, position, caches, sampling, recent=None):
        if together and float(sampling.parameters[0].item()) == 0.5:  # the request below
            failing.append(1)
            raise RuntimeError("broken on purpose")
        return real(model, token, position, caches, sampling, recent)

    def batch_step(*_):
        together.append(1)
        raise RuntimeError("a common step that contains the request below")

    def admit_both(worker):
        if worker.running or worker.waiting == 2:
            admit(worker)

    monkeypatch.setattr(type(server.worker.model), "step", step)
    monkeypatch.setattr(type(server.worker.model), "batch_step", batch_step)
    monkeypatch.setattr(type(server.worker), "_admit", admit_both)

    def fail():
        wishes = {"model": "tiny", "prompt": "y\n", "temperature": 0.5, "seed": 1}
        return list(server.openai.completions.create(**wishes, stream=stream))

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(completed, server, "x\n")
        with pytest.raises(openai.APIError, match="broken on purpose"):
            fail()
        assert other.result() == TEXT
    assert together
    assert failing
    monkeypatch.undo()
    assert server.get("/health").status_code == 200
    assert completed(server, "y\n") == TEXT


def _broken(*_):
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("part", ["Engine", "PrefixCache.start"])
def test_a_start_that_fails_after_the_model_is_loaded(monkeypatch, part):
    monkeypatch.setattr(f"lily_mlx.server.worker.{part}", _broken)
    worker = Worker(lambda: load(bundled_checkpoint()))
    with pytest.raises(RuntimeError, match="broken on purpose"):
        worker.start()
    worker.stop()


def test_a_graceful_end():
    """SIGTERM lets a running answer finish, and the process ends with code 0."""
    with (
        started("--shutdown-seconds", "20") as server,
        httpx.stream(
            "POST",
            f"{server.address}/v1/completions",
            timeout=60,
            json={"prompt": "My", "max_tokens": 12, "stream": True},
        ) as answer,
    ):
        events = answer.iter_lines()
        next(events)
        server.process.send_signal(signal.SIGTERM)
        assert "data: [DONE]" in list(events)
        assert server.process.wait(30) in (0, -signal.SIGTERM), "".join(server.log)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        pytest.param({}, len(SCRIPT) + 1, id="to-the-end"),
        pytest.param({"max_tokens": 3}, 2, id="to-a-limit"),
        pytest.param({"stop": " gam"}, 3, id="to-a-stop-string"),
    ],
)
def test_a_device_that_works_ahead(scripted, monkeypatch, options, kept):
    """As on a GPU, where the next step is submitted before a token is read; what is ahead when a text ends is kept."""
    server = scripted(*SCRIPT)
    prompt = server.worker.tokenizer.encode("ahead of its time\n")
    alone = completed(server, prompt, **options)
    server.worker.cache.clear()
    monkeypatch.setattr(Engine, "looks_ahead", property(lambda engine: True))
    assert completed(server, prompt, **options) == alone
    wait_until(lambda: server.worker.running == 0)
    ids = server.worker.tokenizer.get_vocab()
    answer = [ids[piece.replace(" ", "\u0120")] for piece in SCRIPT] + [server.worker.tokenizer.eos_token_id]
    found, _ = server.worker.cache.longest([*prompt, *answer, 0])
    assert found is not None
    assert found.length == len(prompt) + kept
