"""The chat template writes Qwen3.6's format."""

from __future__ import annotations

import json

import jinja2
import pytest

USER = {"role": "user", "content": "Who is there?"}
CALL = {"name": "add", "arguments": {"a": 12, "s": "x\ny", "flag": True, "list": [1, "é"]}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL_TEXT = (
    "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=s>\nx\ny\n</parameter>\n"
    '<parameter=flag>\ntrue\n</parameter>\n<parameter=list>\n[1, "é"]\n</parameter>\n</function>\n</tool_call>'
)


def call_turn(arguments, content=""):
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


@pytest.fixture
def render(tokenizer):
    def apply(messages, **options):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    return apply


@pytest.mark.parametrize(
    ("options", "end"),
    [
        pytest.param({}, "<|im_start|>assistant\n<think>\n", id="default"),
        pytest.param({"enable_thinking": True}, "<|im_start|>assistant\n<think>\n", id="thinking"),
        pytest.param({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n", id="no-thinking"),
    ],
)
def test_generation_prompt(render, options, end):
    text = render([USER], add_generation_prompt=True, **options)
    assert text == "<|im_start|>user\nWho is there?<|im_end|>\n" + end


@pytest.mark.parametrize("role", ["system", "developer"])
def test_developer_is_system(render, role):
    text = render([{"role": role, "content": " Be brief. "}, USER])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho is there?<|im_end|>\n"


def test_tools_and_system_text_share_one_turn(render):
    text = render([{"role": "system", "content": "Be brief."}, USER], tools=[TOOL])
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\n# Tools\n")
    assert system.endswith("\n\nBe brief.")
    listed = system.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(listed) == TOOL
    assert rest == "<|im_start|>user\nWho is there?<|im_end|>\n"


@pytest.mark.parametrize(
    ("content", "between"),
    [pytest.param("", "", id="no-words"), pytest.param("Wait. ", "Wait.\n\n", id="words-before")],
)
def test_tool_call_with_object_arguments(render, content, between):
    text = render([USER, call_turn(CALL["arguments"], content)])
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n" + between + CALL_TEXT + "<|im_end|>\n")


def test_tool_call_with_text_arguments(render):
    text = render([USER, call_turn('{"a": 12}')])
    assert text.endswith('<function=add>\n{"a": 12}\n</function>\n</tool_call><|im_end|>\n')


@pytest.mark.parametrize("arguments", ["", "{}", {}, None, " {} "])
def test_tool_call_without_arguments(render, arguments):
    assert render([USER, call_turn(arguments)]).endswith(
        "<tool_call>\n<function=add>\n</function>\n</tool_call><|im_end|>\n"
    )


def test_parser_of_mlx_lm_reads_a_rendered_call(tokenizer, render):
    text = render([USER, call_turn({"a": 12, "s": "x\ny"})])
    inner = text.split("<tool_call>")[1].split("</tool_call>")[0]
    assert tokenizer.tool_parser(inner.strip(), [TOOL]) == {"name": "add", "arguments": {"a": 12, "s": "x\ny"}}


def test_results_of_tools_share_one_user_turn(render):
    results = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
    text = render([USER, call_turn({"a": 1}), *results])
    response = "\n<tool_response>\n{}\n</tool_response>"
    assert text.endswith("<|im_start|>user" + response.format(3) + response.format(4) + "<|im_end|>\n")


def test_thinking_of_earlier_turns_is_dropped(render):
    turn = {"role": "assistant", "content": "Tis I.", "reasoning_content": "Hm."}
    text = render([USER, turn, USER])
    assert "Hm." not in text
    assert "<|im_start|>assistant\nTis I.<|im_end|>\n" in text
    assert "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nTis I.<|im_end|>\n" in render(
        [USER, turn, USER], preserve_thinking=True
    )


def test_thinking_inside_the_content_is_found(render):
    separate = {"role": "assistant", "content": "Tis I.", "reasoning_content": "Hm."}
    inside = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTis I."}
    assert render([USER, inside]) == render([USER, separate])


def test_thinking_between_tool_calls_is_kept(render):
    turn = call_turn({"a": 1}) | {"reasoning_content": "Count."}
    text = render([USER, turn, {"role": "tool", "content": "3"}], add_generation_prompt=True)
    assert "<think>\nCount.\n</think>\n\n<tool_call>" in text
    assert text.count("<think>") == text.count("</think>") + 1


@pytest.mark.parametrize("reasoning", ["", "Let me see.\n\nA door."])
@pytest.mark.parametrize("thinking", [True, False])
def test_second_turn_starts_with_the_first(tokenizer, reasoning, thinking):
    if reasoning and not thinking:
        reasoning = ""
    answer = {"role": "assistant", "content": "Tis I.\n\nHAMLET:\nWho?", "reasoning_content": reasoning}
    options = {"preserve_thinking": True, "enable_thinking": thinking}
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True, **options)
    written = (f"{reasoning}\n</think>\n\n" if thinking else "") + answer["content"] + "<|im_end|>"
    first = prompt + tokenizer.encode(written, add_special_tokens=False)
    second = tokenizer.apply_chat_template([USER, answer, USER], add_generation_prompt=True, **options)
    assert second[: len(first)] == first


def test_text_parts_are_joined(render):
    parts = [{"type": "text", "text": "Who is "}, {"type": "text", "text": "there?"}]
    assert render([{"role": "user", "content": parts}]) == render([USER])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        pytest.param([], "empty", id="no-messages"),
        pytest.param([{"role": "banana", "content": "x"}], "Unknown message role: banana", id="unknown-role"),
        pytest.param([{"role": None, "content": "x"}], "Unknown message role", id="null-role"),
        pytest.param([{"content": "x"}], "Unknown message role", id="no-role"),
        pytest.param([USER, {"role": "system", "content": "x"}], "first message", id="late-system"),
        pytest.param([{"role": "user", "content": [{"type": "image_url"}]}], "text only", id="image"),
        pytest.param([{"role": "user", "content": 3}], "must be a string", id="number"),
    ],
)
def test_bad_messages_raise(render, messages, words):
    with pytest.raises((jinja2.TemplateError, ValueError, IndexError), match=words):
        render(messages)
