"""The openai package against the server: every way to ask, errors, cancellation, and sixteen streams at once."""

from __future__ import annotations

import asyncio
import contextlib
import json

import openai
import pytest

from .test_text import TOOLS
from .test_tools import CALL, THOUGHT

SCRIPT = ("alpha", " beta", " gam", "ma", " delta", " eps")
TEXT = "".join(SCRIPT)
HELLO = [{"role": "user", "content": "hello"}]


def create(server, **options):
    return server.openai.chat.completions.create(**{"model": "tiny", "messages": HELLO, **options})


def asynchronous(server, **options):
    return openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120, **options)


def test_sixteen_chat_streams_equal_sequential_chats(tiny):
    words = [
        "Who",
        "King",
        "Ghost",
        "night",
        "sword",
        "love",
        "father",
        "bell",
        "7",
        "Rome",
        "Why",
        "sea",
        "crown",
        "42",
        "mad",
        "queen",
    ]

    def options(i):
        messages = [{"role": "user", "content": words[i]}]
        wish = {"model": "tiny", "messages": messages, "max_tokens": 2 + i % 2, "logprobs": True}
        return {**wish, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}

    async def stream(client, i):
        chunks = await client.chat.completions.create(**options(i), stream=True)
        return [entry.token async for chunk in chunks for entry in (chunk.choices[0].logprobs or Empty).content]

    async def all_at_once():
        async with asynchronous(tiny) as client:
            return await asyncio.gather(*(stream(client, i) for i in range(16)))

    alone = []
    for i in range(16):
        choice = tiny.openai.chat.completions.create(**options(i)).choices[0]
        alone.append([entry.token for entry in choice.logprobs.content])
    tiny.worker.cache.clear()
    assert asyncio.run(all_at_once()) == alone
    assert [len(tokens) for tokens in alone] == [2 + i % 2 for i in range(16)]
    assert len({tuple(tokens) for tokens in alone}) > 4


class Empty:
    content: tuple = ()


def test_the_stream_helper_accumulates(scripted):
    with scripted(*SCRIPT).openai.chat.completions.stream(model="tiny", messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT
    assert final.choices[0].finish_reason == "stop"
    assert kinds.count("content.delta") == len(SCRIPT) + 1  # the first has the role and no text
    assert kinds[-1] == "content.done"


def test_the_stream_helper_accumulates_a_call(scripted):
    with scripted(*CALL).openai.chat.completions.stream(model="tiny", messages=HELLO, tools=TOOLS) as stream:
        (done,) = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert (done.name, json.loads(done.arguments)) == ("add", {"a": 12, "s": "x\ny"})
    assert message.content == "I will call. "
    assert message.tool_calls[0].id


def test_an_answer_can_be_sent_back_as_it_is(scripted):
    """What the client gives for a message is what it may send as the next turn's history."""
    server = scripted(*CALL)
    message = create(server, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "13"}
    answer = create(server, tools=TOOLS, messages=[*HELLO, message, result])
    assert answer.choices[0].finish_reason == "tool_calls"
    thought = create(scripted(*THOUGHT, thinking=True)).choices[0].message
    assert thought.reasoning_content == "Hmm."
    again = create(scripted(*THOUGHT, thinking=True), messages=[*HELLO, thought.model_dump(), *HELLO])
    assert again.choices[0].message.content == "The answer is 5."


@pytest.mark.parametrize(
    ("options", "status", "param"),
    [
        pytest.param({"temperature": -1}, 400, "temperature", id="a-bad-field"),
        pytest.param({"messages": []}, 400, "messages", id="no-messages"),
        pytest.param({"messages": [{"role": "x", "content": ""}]}, 400, "messages", id="a-bad-role"),
        pytest.param({"model": "gpt-4"}, 404, "model", id="another-model"),
        pytest.param({"extra_body": {"top_k": "x"}}, 400, "top_k", id="a-bad-extra-field"),
    ],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_errors(scripted, options, status, param, stream):
    server = scripted(*SCRIPT)
    with pytest.raises(openai.APIStatusError) as raised:
        create(server, stream=stream, **options)
    assert raised.value.status_code == status
    assert type(raised.value) is {400: openai.BadRequestError, 404: openai.NotFoundError}[status]
    assert raised.value.param == param
    assert raised.value.body["message"]
    assert create(server).choices[0].message.content == TEXT


def test_own_fields_go_into_the_extra_body(scripted):
    answer = create(scripted(*SCRIPT), extra_body={"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0}, temperature=1)
    assert answer.choices[0].message.content == TEXT
    raw = scripted(*SCRIPT).openai.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, user="me", metadata={"a": "b"}, store=False
    )
    assert {"user", "metadata", "store"} <= set(raw.headers["warning"].replace('"', "").replace(",", "").split())
    assert raw.parse().choices[0].message.content == TEXT


ENDLESS = {"max_tokens": 3000, "logit_bias": {str(token): -100 for token in (2000, 2001, 2002)}}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_cancelled_task_ends_the_work(tiny, stream):
    generated = tiny.worker.generated_tokens

    async def cancelled():
        async with asynchronous(tiny) as client:
            first = asyncio.Event()

            async def ask():
                answer = await client.chat.completions.create(model="tiny", messages=HELLO, stream=stream, **ENDLESS)
                async for _ in answer:
                    first.set()

            task = asyncio.create_task(ask())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(first.wait(), 1.5)
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(500):
                if not tiny.worker.running:
                    return
                await asyncio.sleep(0.02)

    asyncio.run(cancelled())
    assert tiny.worker.running == 0
    assert tiny.worker.generated_tokens - generated < 500


def test_a_timeout_of_the_client(tiny):
    with pytest.raises(openai.APITimeoutError):
        tiny.openai.with_options(timeout=0.5).chat.completions.create(model="tiny", messages=HELLO, **ENDLESS)
    assert create(tiny, max_tokens=1).choices[0].finish_reason == "length"


def test_thinking_is_switched_by_the_template(tiny):
    (word,) = tiny.worker.tokenizer.encode("And")
    for thinking, field, other in ((True, "reasoning_content", "content"), (False, "content", "reasoning_content")):
        options = {"chat_template_kwargs": {"enable_thinking": thinking}}
        answer = create(tiny, max_tokens=3, logit_bias={str(word): 100}, extra_body=options)
        message = answer.choices[0].message.model_dump()
        assert message[field] == "AndAndAnd"
        assert not message.get(other)
