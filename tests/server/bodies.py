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

TOKENS = st.integers(-2, 400)
# Fields with values of their own form, so that some requests get past the checks.
FORMS = {
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(0, 400),
    "min_p": st.floats(0, 1),
    "min_tokens_to_keep": st.integers(1, 330),
    "xtc_probability": st.floats(0, 1),
    "xtc_threshold": st.floats(0, 0.5),
    "repetition_penalty": st.floats(0, 5),
    "repetition_context_size": st.integers(0, 100),
    "presence_penalty": st.floats(-5, 5),
    "presence_context_size": st.integers(0, 100),
    "frequency_penalty": st.floats(-5, 5),
    "frequency_context_size": st.integers(0, 100),
    "logit_bias": st.dictionaries(TOKENS.map(str) | TEXTS, st.floats(-200, 200) | VALUES, max_size=3),
    "seed": st.integers(),
    "n": st.integers(1, 2),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans() | VALUES}),
    "max_tokens": st.integers(1, 3),
    "max_completion_tokens": st.integers(1, 3),
    "model": st.sampled_from(["tiny", "default_model"]),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}]),
    "adapters": VALUES,
    "user": TEXTS,
    "something_else": VALUES,
}
_CHAT_FORMS = {
    **FORMS,
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["enable_thinking", "preserve_thinking", "tools", "bos_token", "x"]) | TEXTS, VALUES, max_size=2
    ),
}
_COMPLETION_FORMS = {
    **FORMS,
    "logprobs": st.integers(0, 20),
    "echo": st.booleans(),
    "suffix": TEXTS,
    "best_of": st.integers(1, 2),
}


def _bodies(first: dict[str, st.SearchStrategy], forms: dict[str, st.SearchStrategy]) -> st.SearchStrategy:
    """Mostly right values, so that a body with many fields is not always refused for one."""
    mixed = {name: st.one_of(form, form, form, VALUES) for name, form in forms.items()}
    return st.fixed_dictionaries(first, optional=forms) | st.fixed_dictionaries(first, optional=mixed)


CHATS = _bodies({"messages": MESSAGES}, _CHAT_FORMS) | st.fixed_dictionaries({"messages": VALUES})
PROMPTS = TEXTS | st.lists(TEXTS, max_size=2) | st.lists(TOKENS, max_size=5) | st.lists(st.lists(TOKENS), max_size=2)
COMPLETIONS = _bodies({"prompt": PROMPTS | VALUES}, _COMPLETION_FORMS)


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
