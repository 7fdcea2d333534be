"""Tool calls and reasoning over HTTP, on scripts, whole and as streams."""

from __future__ import annotations

import copy
import json

import pytest
from mlx_lm.utils import load_tokenizer

from lily_mlx.checkpoints import bundled_checkpoint
from lily_mlx.server.errors import RequestError
from lily_mlx.server.prompts import make_prompts
from lily_mlx.server.protocol import Defaults, parse_request

from .test_text import TOOLS

QUESTION = {"role": "user", "content": "Who is there?"}
CALL = (
    "I will",
    " call. ",
    "<tool",
    "_call>\n<func",
    "tion=add>\n<para",
    "meter=a>\n1",
    "2\n</parameter>\n",
    "<parameter=s>\nx\n",
    "y\n</par",
    "ameter>\n</function>",
    "\n</tool_call>",
)
TWO = (
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "\n\n",
    "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>",
)
NOT_A_CALL = ("<tool_call>\n2026", "-11-30\n</tool_call>")
THOUGHT = ("Hm", "m.", "\n</thi", "nk>\n\n", "The answer", " is 5.")


def both(server, **options):
    """The message and the finish reason, after a check that the stream gives the same."""
    messages = [{"role": "user", "content": "hello"}]
    whole = server.openai.chat.completions.create(model="tiny", messages=messages, **options).choices[0]
    content, reasoning, calls, reason = "", "", {}, None
    for chunk in server.openai.chat.completions.create(model="tiny", messages=messages, stream=True, **options):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for part in choice.delta.tool_calls or []:
            name, arguments = calls.get(part.index, ("", ""))
            calls[part.index] = (name + (part.function.name or ""), arguments + part.function.arguments)
        reason = choice.finish_reason or reason
    made = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    assert (content, list(calls.values()), reason) == (whole.message.content or "", made, whole.finish_reason)
    assert reasoning == getattr(whole.message, "reasoning_content", "")
    return whole.message, whole.finish_reason


def test_c59_a_call_at_odd_borders(scripted):
    message, reason = both(scripted(*CALL), tools=TOOLS)
    assert message.content == "I will call. "
    assert reason == "tool_calls"
    (call,) = message.tool_calls
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"a": 12, "s": "x\ny"}
    assert call.id


def test_two_calls(scripted):
    message, reason = both(scripted(*TWO), tools=TOOLS)
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("now", {}),
        ("add", {"a": 3}),
    ]
    assert len({call.id for call in message.tool_calls}) == 2
    assert (message.content, reason) == (None, "tool_calls")


@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param(NOT_A_CALL, {"tools": TOOLS}, id="C67-not-a-call"),
        pytest.param(CALL, {}, id="no-tools"),
        pytest.param(CALL, {"tools": TOOLS, "tool_choice": "none"}, id="tool-choice-none"),
        pytest.param(CALL, {"tools": TOOLS, "max_tokens": 8}, id="cut-off-by-max-tokens"),
        pytest.param(CALL, {"tools": TOOLS, "stop": "ameter>\n</function>"}, id="cut-off-by-a-stop-string"),
    ],
)
def test_c67_what_is_no_call_is_text(scripted, script, options):
    message, reason = both(scripted(*script), **options)
    text = "".join(script[: options.get("max_tokens")])
    stop = options.get("stop")
    assert message.content == (text[: text.index(stop)] if stop else text)
    assert message.tool_calls is None
    assert reason == ("length" if "max_tokens" in options else "stop")


def test_reasoning_is_split_off(scripted):
    message, reason = both(scripted(*THOUGHT, thinking=True))
    assert (message.reasoning_content, message.content, reason) == ("Hmm.", "The answer is 5.", "stop")


def test_reasoning_that_is_cut_off(scripted):
    message, reason = both(scripted(*THOUGHT, thinking=True), max_tokens=2)
    assert (message.reasoning_content.strip(), message.content, reason) == ("Hmm.", "", "length")


def prompt(tokenizer, messages, **body):
    """The prompt of a chat, without generating."""
    request = parse_request({"messages": messages, **body}, True, Defaults(), 2048)
    (made,) = make_prompts(request, tokenizer, {})
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(bundled_checkpoint())


def test_whether_a_prompt_opens_a_thought(tokenizer):
    messages = [{"role": "user", "content": "x"}]
    assert prompt(tokenizer, messages).in_thought
    assert not prompt(tokenizer, messages, chat_template_kwargs={"enable_thinking": False}).in_thought


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, "", "{}", None], ids=repr)
def test_c51_arguments_in_the_history(tokenizer, arguments):
    def rendered(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return prompt(tokenizer, [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]).tokens

    assert rendered(arguments) == rendered({"a": 1} if arguments and arguments != "{}" else {})


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", 5])
def test_c51_broken_arguments_are_refused(tokenizer, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    with pytest.raises(RequestError, match="arguments of a tool call"):
        prompt(tokenizer, [QUESTION, {"role": "assistant", "tool_calls": [call]}])


def test_c47_developer_is_system(tokenizer):
    first, second = (
        prompt(tokenizer, [{"role": role, "content": "In French"}, QUESTION]) for role in ("system", "developer")
    )
    assert first == second


def test_content_parts(tokenizer):
    parts = [{"type": "text", "text": "Who is "}, {"type": "text", "text": "there?"}]
    assert prompt(tokenizer, [{"role": "user", "content": parts}]) == prompt(tokenizer, [QUESTION])


def test_c57_no_template(scripted, tokenizer):
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    bare = TokenizerWrapper(copy.deepcopy(tokenizer._tokenizer))
    bare._tokenizer.chat_template = None
    bare.has_chat_template = False
    with pytest.raises(RequestError, match="no chat template"):
        prompt(bare, [QUESTION])
