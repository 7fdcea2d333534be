"""Chats and completions, whole and as streams, through OpenAI's client and plain HTTP."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

STOP_SCRIPT = ("alpha", " beta", " gam", "ma", " delta", " eps")
UTF8_SCRIPT = ("alpha", " \u6f22", "\u5b57 e", "\u0301", " \U0001f3f3", "\ufe0f", "\u200d", "\U0001f308")


def content(answer):
    return answer.json()["choices"][0]["message"]["content"]


def streamed(server, text="hello", **options):
    """The joined content, the last finish reason and all chunks of a stream."""
    messages = [{"role": "user", "content": text}]
    chunks = list(server.openai.chat.completions.create(model="tiny", messages=messages, stream=True, **options))
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return "".join(choice.delta.content or "" for choice in deltas), deltas[-1].finish_reason, chunks


def test_a_whole_chat(scripted):
    server = scripted(*STOP_SCRIPT)
    answer = server.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    assert answer.choices[0].message.content == "alpha beta gamma delta eps"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage.completion_tokens == len(STOP_SCRIPT) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat(scripted):
    text, reason, chunks = streamed(scripted(*STOP_SCRIPT), stream_options={"include_usage": True})
    assert (text, reason) == ("alpha beta gamma delta eps", "stop")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(STOP_SCRIPT) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        pytest.param(["ma del"], "alpha beta gam", id="C27-across-tokens"),
        pytest.param(["gam"], "alpha beta ", id="C27-beginning-of-a-word"),
        pytest.param(["a"], "", id="C27-first-character"),
        pytest.param("ma del", "alpha beta gam", id="a-string"),
        pytest.param(["gamma x"], "alpha beta gamma delta eps", id="C29-partial-match-that-fails"),
        pytest.param(["delta", " beta"], "alpha", id="C31-earliest-wins"),
        pytest.param([" beta", "delta"], "alpha", id="C31-earliest-wins-reversed"),
        pytest.param(["zzz", "delta"], "alpha beta gamma ", id="C31-second-of-two"),
        pytest.param(["eps and more"], "alpha beta gamma delta eps", id="held-text-at-the-end"),
        pytest.param(None, "alpha beta gamma delta eps", id="C35-null"),
        pytest.param("", "alpha beta gamma delta eps", id="C35-empty"),
        pytest.param([""], "alpha beta gamma delta eps", id="C35-list-of-empty"),
        pytest.param([], "alpha beta gamma delta eps", id="C35-empty-list"),
    ],
)
def test_stop_strings(scripted, stop, text):
    server = scripted(*STOP_SCRIPT)
    answer = server.ask(stop=stop)
    assert content(answer) == text
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert streamed(server, stop=stop)[:2] == (text, "stop")
    completed = server.post("/v1/completions", prompt="x\n", stop=stop).json()
    assert completed["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        pytest.param(None, "".join(UTF8_SCRIPT), id="C37-scalars-one-by-one"),
        pytest.param(["\u6f22\u5b57"], "alpha ", id="C33-across-tokens"),
        pytest.param(["\u00e9"], "".join(UTF8_SCRIPT), id="C33-no-normalisation"),
    ],
)
def test_characters_stay_whole(scripted, stop, text):
    server = scripted(*UTF8_SCRIPT)
    assert content(server.ask(stop=stop)) == text
    assert streamed(server, stop=stop)[0] == text


def test_max_tokens_cuts(scripted):
    answer = scripted(*STOP_SCRIPT).ask(max_tokens=3).json()
    assert answer["choices"][0]["message"]["content"] == "alpha beta gam"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_logprobs_of_a_chat(scripted):
    server = scripted(*STOP_SCRIPT)
    messages = [{"role": "user", "content": "hello"}]
    options = {"model": "tiny", "messages": messages, "logprobs": True, "top_logprobs": 2}
    answer = server.openai.chat.completions.create(**options)
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries] == list(STOP_SCRIPT)
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
    chunks = server.openai.chat.completions.create(**options, stream=True)
    parts = [c.choices[0].logprobs.content for c in chunks if c.choices and c.choices[0].logprobs]
    assert [entry.token for part in parts for entry in part] == list(STOP_SCRIPT)


def test_logprobs_without_alternatives(scripted):
    entries = scripted(*STOP_SCRIPT).ask(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in entries] == [[]] * len(STOP_SCRIPT)


def test_a_completion_with_logprobs(scripted):
    server = scripted(*STOP_SCRIPT)
    answer = server.openai.completions.create(model="tiny", prompt="x\n", logprobs=2, max_tokens=3)
    choice = answer.choices[0]
    assert choice.text == "alpha beta gam"
    assert choice.logprobs.tokens == ["alpha", " beta", " gam"]
    assert choice.logprobs.text_offset == [0, 5, 10]
    assert all(token in top for token, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True))
    chunks = server.openai.completions.create(model="tiny", prompt="x\n", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "alpha beta gamma delta eps"


def test_several_prompts_and_choices(scripted):
    server = scripted(*STOP_SCRIPT)
    answer = server.post("/v1/completions", prompt=["one\n", "two\n"], n=2, max_tokens=2).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in answer["choices"]} == {"alpha beta"}
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens"] == 8


def test_token_ids_as_a_prompt(tiny):
    text = tiny.post("/v1/completions", prompt="My lord", max_tokens=4).json()
    tokens = tiny.worker.tokenizer.encode("My lord")
    assert tiny.post("/v1/completions", prompt=tokens, max_tokens=4).json()["choices"] == text["choices"]


def test_logit_bias_forbids_and_forces(scripted):
    server = scripted(*STOP_SCRIPT)
    (first,) = server.ask(max_tokens=1, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    forced = server.ask(max_tokens=1, logit_bias={"65": 1000}, logprobs=True).json()["choices"][0]["logprobs"]
    assert forced["content"][0]["id"] == 65
    assert content(server.ask(max_tokens=1, logit_bias={str(first["id"]): -1000})) != "alpha"


def test_c21_seeds(tiny):
    def ask(**options):
        return content(tiny.ask("Speak", max_tokens=6, temperature=1.5, **options))

    assert ask(seed=1) == ask(seed=1)
    assert ask(seed=1) != ask(seed=2)
    assert len({ask() for _ in range(3)}) > 1
    several = tiny.ask("Speak", max_tokens=6, temperature=1.5, seed=1, n=2).json()["choices"]
    assert [choice["message"]["content"] for choice in several] == [ask(seed=1), ask(seed=2)]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        pytest.param("max_tokens", [0, -1, "5", 5.5, True], id="C93-max_tokens"),
        pytest.param("temperature", [-1, "hot", [1], 10**400], id="C19-temperature"),
        pytest.param("top_p", [-0.1, 1.1, "x"], id="top_p"),
        pytest.param("top_k", [-1, 1.5, "x"], id="top_k"),
        pytest.param("min_p", [-0.1, 1.1], id="min_p"),
        pytest.param("stop", [5, [5], [None], {}], id="C35-stop"),
        pytest.param("n", [0, 129, "x"], id="n"),
        pytest.param("seed", ["x", 1.5], id="seed"),
        pytest.param("stream", ["yes", 1], id="stream"),
        pytest.param("stream_options", ["x", {"include_usage": "true"}], id="C95-stream_options"),
        pytest.param("logprobs", [1, "x"], id="C99-logprobs"),
        pytest.param("top_logprobs", [2], id="top_logprobs-alone"),
        pytest.param("logit_bias", [[1], {"x": 1}, {"999999": 1}, {"1": "x"}], id="logit_bias"),
        pytest.param("repetition_penalty", [-1, "x"], id="repetition_penalty"),
        pytest.param("tools", ["x", [{"type": "function"}]], id="C77-tools"),
        pytest.param("tool_choice", ["required", {"type": "function", "function": {"name": "f"}}], id="tool_choice"),
        pytest.param("response_format", ["json", {"type": "xml"}, {"type": "json_schema"}], id="response_format"),
        pytest.param(
            "messages", [None, [], "x", [1], [{"role": "banana", "content": "x"}], [{"content": "x"}]], id="messages"
        ),
        pytest.param("messages", [[{"role": "user", "content": [{"type": "image_url"}]}]], id="C49-image"),
        pytest.param("chat_template_kwargs", ["x", {"tokenize": True}], id="chat_template_kwargs"),
        pytest.param("model", [5, []], id="model"),
    ],
)
def test_a_bad_field_is_named(scripted, field, values):
    server = scripted(*STOP_SCRIPT)
    for value in values:
        body = {"messages": [{"role": "user", "content": "hello"}], field: value}
        answer = httpx.post(f"{server.address}/v1/chat/completions", content=json.dumps(body), timeout=60)
        assert answer.status_code == 400, (value, answer.text)
        assert answer.json()["error"]["param"] == field
        assert field in answer.json()["error"]["message"] or field == "messages"


def test_null_is_absent(scripted):
    nulls = dict.fromkeys(("max_tokens", "temperature", "top_p", "stop", "n", "seed", "stream", "tools", "model"))
    assert content(scripted(*STOP_SCRIPT).ask(**nulls)) == "alpha beta gamma delta eps"


def test_extreme_values_that_are_allowed(scripted):
    server = scripted(*STOP_SCRIPT)
    for options in ({"temperature": 1e-40}, {"temperature": 1, "top_k": 320, "top_p": 1e-9}, {"top_k": 10**9}):
        assert content(server.ask(**options)) == "alpha beta gamma delta eps"
    assert content(server.ask(max_completion_tokens=2, max_tokens=5)) == "alpha beta"


def test_unknown_fields_are_named_in_a_warning(scripted):
    answer = scripted(*STOP_SCRIPT).ask(user="me", prompt_cache_key="k", best='a"\n\u6f22')
    assert answer.status_code == 200
    assert answer.headers["warning"].startswith("299 ")
    assert all(name in answer.headers["warning"] for name in ("user", "prompt_cache_key", "best"))
    assert "warning" not in scripted(*STOP_SCRIPT).ask().headers


def test_c101_models(scripted):
    server = scripted(*STOP_SCRIPT)
    (entry,) = server.openai.models.list().data
    assert (entry.id, entry.object) == ("tiny", "model")
    assert server.openai.models.retrieve("tiny").id == "tiny"
    for name in ("tiny", "default_model", None):
        assert server.ask(model=name, max_tokens=1).status_code == 200
    with pytest.raises(openai.NotFoundError, match="other"):
        server.openai.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert server.get("/v1/models/other").status_code == 404


def test_c105_a_prompt_beyond_the_context(tiny):
    answer = tiny.post("/v1/completions", prompt=[5] * 40000)
    assert answer.status_code == 400
    assert "40000" in answer.json()["error"]["message"]
    assert "32768" in answer.json()["error"]["message"]


def test_health_and_metrics(scripted):
    server = scripted(*STOP_SCRIPT)
    assert server.get("/health").json()["status"] == "ok"
    server.ask()
    text = server.get("/metrics").text
    assert "lily_up 1" in text
    assert 'lily_requests_total{path="/v1/chat/completions",status="200"}' in text
    for line in text.splitlines():
        assert line.startswith("# ") or float(line.rsplit(" ", 1)[1]) >= 0


def test_unknown_paths_and_methods(scripted):
    server = scripted(*STOP_SCRIPT)
    assert server.get("/nowhere").status_code == 404
    assert server.get("/v1/completions").status_code == 405
    assert "error" in server.get("/nowhere").json()
    preflight = httpx.options(
        f"{server.address}/v1/completions", headers={"Origin": "http://x", "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "*"
