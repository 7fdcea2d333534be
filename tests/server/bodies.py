"""Hypothesis strategies for bodies of requests: right, nearly right, and wrong in every way."""

from __future__ import annotations

import json

from hypothesis import strategies as st

TEXTS = st.text(max_size=8) | st.sampled_from(
    ["", "alpha", "\u0000", "\ufeff", "\U0001f3f3\ufe0f\u200d\U0001f308", "e\u0301", "\u202e", "<|im_end|>", "<|im_start|>",
     "<think>", "</think>", "<tool_call>", "<function=f>", "{{ messages }}", "{% raw %}", "a" * 300, "true", "NaN"]
)  # fmt: skip
NUMBERS = (
    st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0, -1, -0.0, 1e-40, 1e308, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**400, 5e-324])
)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS


def _deep(depth: int, kind: str) -> object:
    value: object = "x"
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


DEEP = st.builds(_deep, st.sampled_from([10, 100, 400]), st.sampled_from(["list", "object"]))
VALUES = (
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=6,
    )
    | DEEP
)

SCHEMAS = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "x"]) | VALUES}),
    lambda inner: st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(TEXTS, inner, max_size=2)},
        optional={"required": VALUES, "anyOf": st.lists(inner, max_size=2) | VALUES, "$ref": VALUES},
    ),
    max_leaves=4,
)  # fmt: skip
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": TEXTS}, optional={"parameters": SCHEMAS | VALUES})}
    ),
    max_size=2,
)  # fmt: skip
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": TEXTS}, optional={"arguments": TEXTS | VALUES})},
        optional={"id": VALUES, "type": VALUES},
    ),
    max_size=2,
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "input_text", "image_url"]) | VALUES},
        optional={"text": TEXTS | VALUES, "image_url": VALUES},
    ),
    max_size=2,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "x"]) | VALUES},
    optional={
        "content": TEXTS | PARTS | VALUES,
        "reasoning_content": TEXTS | VALUES,
        "tool_calls": CALLS | VALUES,
        "tool_call_id": VALUES,
        "name": VALUES,
    },
)
MESSAGES = (
    st.just([{"role": "user", "content": "hello"}])
    | st.lists(MESSAGE, max_size=3)
    | st.builds(lambda rest: [{"role": "user", "content": "hello"}, *rest], st.lists(MESSAGE, max_size=3))
)

TOKENS = st.integers(0, 319)
SOUND_MESSAGES = st.builds(
    lambda system, turns: [*system, *turns, {"role": "user", "content": "hello"}],
    st.lists(st.builds(lambda text: {"role": "system", "content": text}, TEXTS), max_size=1),
    st.lists(
        st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), TEXTS),
        max_size=2,
    ),
)
SOUND_TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "g"}},
]
# Right values. A body of these alone is answered with 200.
FORMS = {
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(0, 400) | st.just(2**70),
    "min_p": st.floats(0, 1),
    "min_tokens_to_keep": st.integers(1, 320),
    "xtc_probability": st.floats(0, 1),
    "xtc_threshold": st.floats(0, 0.5),
    "repetition_penalty": st.floats(0, 5),
    "repetition_context_size": st.integers(0, 100),
    "presence_penalty": st.floats(-5, 5),
    "presence_context_size": st.integers(0, 100),
    "frequency_penalty": st.floats(-5, 5),
    "frequency_context_size": st.integers(0, 100),
    "logit_bias": st.dictionaries(TOKENS.map(str), st.floats(-200, 200), max_size=3),
    "seed": st.integers(),
    "n": st.integers(1, 2),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "max_tokens": st.integers(1, 3),
    "max_completion_tokens": st.integers(1, 3),
    "model": st.sampled_from(["tiny", "default_model"]),
    "response_format": st.sampled_from(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
        ]
    ),
    "user": TEXTS,
    "something_else": VALUES,
}  # fmt: skip
CHAT_FORMS = {
    **FORMS,
    "logprobs": st.just(True),
    "tools": st.sampled_from([SOUND_TOOLS, SOUND_TOOLS[:1], []]),
    "tool_choice": st.sampled_from(["auto", "none"]),
    "parallel_tool_calls": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["enable_thinking", "preserve_thinking"]), st.booleans()),
}
COMPLETION_FORMS = {**FORMS, "logprobs": st.integers(0, 20)}
# Nearly right, and fields whose values depend on others.
WRONG = {
    "messages": MESSAGES | VALUES,
    "prompt": VALUES | st.lists(st.integers(-2, 400), max_size=3),
    "tools": TOOLS | VALUES,
    "tool_choice": st.sampled_from(["required", {"type": "function", "function": {"name": "f"}}]) | VALUES,
    "logit_bias": st.dictionaries(st.integers(-2, 400).map(str) | TEXTS, VALUES, min_size=1, max_size=2) | VALUES,
    "top_logprobs": st.integers(0, 21) | VALUES,
    "stream_options": st.dictionaries(st.just("include_usage"), VALUES) | VALUES,
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["tools", "bos_token", "x"]) | TEXTS, VALUES, max_size=2),
    "response_format": st.builds(
        lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}, SCHEMAS | VALUES
    )
    | VALUES,
    **dict.fromkeys(("echo", "suffix", "best_of", "adapters", "draft_model", "role_mapping"), VALUES),
}


def _bodies(first: dict[str, st.SearchStrategy], forms: dict[str, st.SearchStrategy]) -> st.SearchStrategy:
    """Half of the bodies are right; most others are wrong in one field, and some in any number of fields."""
    right = st.fixed_dictionaries(first, optional=forms)
    fields = sorted({*first, *forms, *WRONG})
    wrong_field = st.sampled_from(fields).flatmap(lambda name: st.tuples(st.just(name), WRONG.get(name, VALUES)))
    one_wrong = st.builds(lambda body, field: {**body, field[0]: field[1]}, right, wrong_field)
    anything = st.fixed_dictionaries({}, optional={name: forms.get(name, VALUES) | VALUES for name in fields})
    return st.one_of(right, right, right, one_wrong, one_wrong, anything)


CHATS = _bodies({"messages": SOUND_MESSAGES}, CHAT_FORMS)
PROMPTS = st.sampled_from(["hello\n", ["a\n", "b\n"]]) | st.lists(TOKENS, min_size=1, max_size=5)
COMPLETIONS = _bodies({"prompt": PROMPTS}, COMPLETION_FORMS)


def _spoiled(body: dict, position: float, junk: bytes) -> bytes:
    data = json.dumps(body).encode()
    place = int(position * len(data))
    return data[:place] + junk + data[place + len(junk) :]


# What is not JSON any more, or is in a way that Python's parser accepts.
RAW = st.binary(max_size=40) | st.builds(
    _spoiled,
    st.just({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 1.5, "stop": ["x", "y"]}),
    st.floats(0, 1),
    st.binary(min_size=1, max_size=3)
    | st.sampled_from([b"NaN", b"Infinity", b"1e999", b'"\\ud800"', b"\\u0000", b"\xff", b"[[[[", b"\x00", b'"a":1,"a":2']),
)  # fmt: skip
