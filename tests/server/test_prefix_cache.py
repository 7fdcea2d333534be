"""The prefix cache: computed tokens over HTTP, and the radix tree by itself."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from lily_mlx.checkpoints import bundled_checkpoint
from lily_mlx.engine import SequenceState
from lily_mlx.server.prefix_cache import PrefixCache
from lily_mlx.server.sequence import SNAPSHOT_EVERY
from lily_mlx.server.worker import Limits
from tests.support import rng

from .support import serving

SYSTEM = {"role": "system", "content": "Answer in verse."}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


@pytest.fixture
def fresh(tiny):
    """The server with an empty cache; `ask` returns the text, the prompt's tokens and the computed ones."""
    tiny.worker.cache.clear()

    def ask(*messages, max_tokens=2, **options):
        before = tiny.worker.computed_tokens
        answer = tiny.post(messages=list(messages), max_tokens=max_tokens, **options).json()
        computed = tiny.worker.computed_tokens - before
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - computed
        message = answer["choices"][0]["message"]
        return message["content"] + message.get("reasoning_content", ""), usage["prompt_tokens"], computed

    ask.tokens = lambda *messages: len(tiny.worker.tokenizer.apply_chat_template(list(messages)))
    return ask


def test_a_first_turn_computes_everything(fresh):
    _, size, computed = fresh(SYSTEM, user("Who is there?"))
    assert computed == size


def test_a_second_turn_computes_its_suffix(fresh):
    first = [SYSTEM, user("Who is there?")]
    text, _, _ = fresh(*first)
    second = [*first, assistant(text), user("Unfold yourself.")]
    _, size, computed = fresh(*second)
    assert computed == size - fresh.tokens(*first)
    third = [*second, assistant("Long live the King!"), user("He?")]
    _, size, computed = fresh(*third)
    assert computed == size - fresh.tokens(*second)


def test_regenerating_computes_the_templates_last_lines(fresh):
    messages = [SYSTEM, user("Who is there?")]
    text, size, _ = fresh(*messages)
    again, _, computed = fresh(*messages)
    assert computed == size - fresh.tokens(*messages)
    assert again == text


def test_an_edited_turn_computes_from_the_edit_on(fresh, tiny):
    history = [SYSTEM, user("Who is there?"), assistant("Nay, answer me.")]
    fresh(*history, user("Long live the King!"))
    _, size, computed = fresh(*history, user("Bernardo?"))
    tokens = tiny.worker.tokenizer.apply_chat_template([*history, user("Bernardo?")])
    question = max(i for i, token in enumerate(tokens) if tiny.worker.tokenizer.decode([token]) == "<|im_start|>")
    assert computed == size - question


def test_a_system_prompt_is_shared(fresh):
    fresh(SYSTEM, user("Who is there?"))
    _, size, computed = fresh(SYSTEM, user("'Tis bitter cold."))
    assert computed == size - fresh.tokens(SYSTEM)


def test_thinking_that_is_kept_costs_nothing_again(fresh, tiny):
    options = {"chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": True}}
    question = user("Who is there?")
    text, size, _ = fresh(SYSTEM, question, **options)
    _, after, computed = fresh(SYSTEM, question, assistant(text), user("Unfold yourself."), **options)
    assert computed < after - size


def test_a_branch_point_is_kept(fresh, tiny):
    """Prompts without messages that share a beginning: the second finds nothing, the third what they share."""
    shared, cache = tiny.worker.tokenizer.encode("To be, or not to be, that is the question: " * 2), tiny.worker.cache
    for tail in (b"Whether", b"And by", b"No more"):
        prompt = shared + tiny.worker.tokenizer.encode(tail.decode())
        answer = tiny.post("/v1/completions", prompt=prompt, max_tokens=1).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (len(shared) if tail == b"No more" else 0)
    assert cache.snapshots


def test_the_same_completion_again_computes_one_token(fresh, tiny):
    first = tiny.post("/v1/completions", prompt="My lord, I came to see", max_tokens=3).json()
    again = tiny.post("/v1/completions", prompt="My lord, I came to see", max_tokens=3).json()
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


def test_choices_share_their_prompt(fresh, tiny):
    before = tiny.worker.computed_tokens
    messages = [SYSTEM, user("Who is there?")]
    answer = tiny.post(messages=messages, max_tokens=2, n=3).json()
    computed = tiny.worker.computed_tokens - before
    size = answer["usage"]["prompt_tokens"]
    assert computed <= size + 2 * (size - fresh.tokens(SYSTEM))
    assert len({choice["message"].get("reasoning_content") for choice in answer["choices"]}) == 1


@pytest.mark.parametrize("c79", ["edit-in-the-middle", "only-the-beginning", "one-token"])
def test_c79_a_cached_prompt_gives_what_it_gives_alone(scripted, c79):
    server = scripted("alpha", " beta", " gamma")
    a, b, c = "x" * 40, "y" * 30, "z" * 30
    other = {"edit-in-the-middle": a + "w" * 30 + c, "only-the-beginning": a, "one-token": "x" + "q" * 20}[c79]
    server.worker.cache.clear()
    alone = server.post("/v1/completions", prompt=other + "\n").json()["choices"]
    server.worker.cache.clear()
    server.post("/v1/completions", prompt=a + b + c + "\n")
    after = server.post("/v1/completions", prompt=other + "\n").json()
    assert after["choices"] == alone
    assert after["choices"][0]["text"] == "alpha beta gamma"


def test_penalties_see_what_the_cache_holds(tiny):
    options = {"max_tokens": 6, "repetition_penalty": 1.8, "repetition_context_size": 40}
    tiny.worker.cache.clear()
    cold = tiny.ask("Speak to me, speak to me", **options).json()["choices"]
    tiny.ask("Speak to me, speak to me", max_tokens=2)
    warm = tiny.ask("Speak to me, speak to me", **options).json()["choices"]
    assert warm == cold


def test_long_prompts_leave_disposable_snapshots(scripted, monkeypatch):
    monkeypatch.setattr("lily_mlx.server.sequence.SNAPSHOT_EVERY", 32)
    server = scripted("alpha", " beta", " gamma")
    server.worker.cache.clear()
    server.post("/v1/completions", prompt="x" * 100 + "\n", max_tokens=1)
    answer = server.post("/v1/completions", prompt="x" * 70 + "y" * 5, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert SNAPSHOT_EVERY == 4096


def test_without_a_budget_everything_is_computed():
    with serving(bundled_checkpoint(), Limits(cache_bytes=0)) as server:
        for _ in range(2):
            usage = server.ask("Who is there?", max_tokens=1).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert server.worker.cache.bytes == server.worker.cache.snapshots == 0


def state(length, *arrays):
    return SequenceState(length, tuple(arrays), None, mx.zeros(1, mx.int32), None)


def test_bytes_of_shared_arrays_count_once():
    shared, own = mx.zeros(100), mx.zeros(10)
    cache = PrefixCache(10**6)
    cache.insert([1, 2], state(2, shared))
    cache.insert([1, 2, 3], state(3, shared, own))
    assert cache.bytes == shared.nbytes + own.nbytes
    cache.clear()
    assert (cache.bytes, cache.snapshots) == (0, 0)


def test_the_budget_drops_disposable_snapshots_then_old_ones():
    cache = PrefixCache(3 * 400)
    cache.insert([1], state(1, mx.zeros(100)))
    cache.insert([2], state(1, mx.zeros(100)))
    cache.insert([3], state(1, mx.zeros(100)), disposable=True)
    cache.insert([4], state(1, mx.zeros(100)))
    held = [token for token in (1, 2, 3, 4) if cache.longest([token, 9])[0] is not None]
    assert held == [1, 2, 4]
    cache.longest([1, 9])
    cache.insert([5], state(1, mx.zeros(100)))
    held = [token for token in (1, 2, 3, 4, 5) if cache.longest([token, 9])[0] is not None]
    assert held == [1, 4, 5]
    assert cache.evictions == 2


def test_a_snapshot_of_other_tokens_is_refused():
    with pytest.raises(ValueError, match="2 tokens was given with 3"):
        PrefixCache(10).insert([1, 2, 3], state(2))


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_finds_what_a_list_finds(seed):
    draw = random.Random(int(rng(seed).integers(1 << 30)))
    cache, held = PrefixCache(10**9, max_snapshots=12), []
    for _ in range(300):
        tokens = tuple(draw.choices((1, 2), k=draw.randint(1, 9)))
        if draw.random() < 0.5:
            cache.insert(tokens, state(len(tokens), mx.zeros(1)))
            held = [item for item in held if item != tokens] + [tokens]
            held = held[-12:]
        else:
            found, common = cache.longest(tokens)
            prefixes = [item for item in held if len(item) < len(tokens) and tokens[: len(item)] == item]
            assert (found.length if found else 0) == max(map(len, prefixes), default=0)
            shared = (
                sum(
                    all(x == y for x, y in zip(tokens[:n], item[:n], strict=False)) and len(item) >= n
                    for n in range(1, len(tokens) + 1)
                )
                for item in held
            )
            assert common == max(shared, default=0)
            if prefixes:
                longest = max(prefixes, key=len)
                held = [item for item in held if item != longest] + [longest]
        assert cache.snapshots == len(held)
