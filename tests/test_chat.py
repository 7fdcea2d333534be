"""`lily_mlx.chat` and `Conversation`: history, snapshots, and what a user types."""

from __future__ import annotations

import io
import sys

import pytest

from lily_mlx import generate, load
from lily_mlx.chat import main
from lily_mlx.conversation import Conversation
from tests.model import synthetic
from tests.model.scripted import EOS, write_scripted
from tests.model.tokenizer import write_tokenizer
from tests.support import run_command


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scripted")
    write_scripted(directory, ["alpha", " \U0001f600", " beta"])
    return directory


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("random")
    ids = write_tokenizer(directory)
    synthetic.write_checkpoint(directory, synthetic.config(eos_token_id=ids[EOS], num_experts_per_tok=8))
    return load(directory)


@pytest.fixture
def chat(capsys, monkeypatch):
    """Runs the command with lines of input; returns exit code, stdout and stderr."""

    def run(lines, *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run_command(main, arguments, capsys)

    return run


def ask(conversation, query, **options):
    return "".join(response.text for response in conversation.ask(query, **options))


def uncached(model, tokenizer, messages, **options):
    return generate(model, tokenizer, tokenizer.apply_chat_template(messages, add_generation_prompt=True), **options)


def test_turns_equal_the_whole_conversation_and_cost_only_what_is_new(random_model):  # C53
    model, tokenizer = random_model
    conversation, messages = Conversation(model, tokenizer, "Be brief."), [{"role": "system", "content": "Be brief."}]
    for turn, query in enumerate(["one", "two", "three"]):
        messages.append({"role": "user", "content": query})
        answer = ask(conversation, query, max_tokens=5)
        assert answer == uncached(model, tokenizer, messages, max_tokens=5)
        messages.append({"role": "assistant", "content": answer})
        assert conversation.messages == messages
        new = conversation.prompt_tokens - conversation.reused_tokens
        print(f"turn {turn}: {conversation.prompt_tokens} tokens, {conversation.reused_tokens} reused")
        if turn:
            rendered = tokenizer.apply_chat_template(messages[-3:-1], add_generation_prompt=True)
            assert 0 < new <= len(rendered) + len("<|im_end|>\n")


def test_a_template_that_changes_earlier_turns(random_model):  # C53
    model, tokenizer = random_model
    template = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if m.role == 'user' or loop.last else 'forgotten' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    try:
        conversation = Conversation(model, tokenizer)
        messages = []
        for query in ("one", "two", "three"):
            messages.append({"role": "user", "content": query})
            answer = ask(conversation, query, max_tokens=5)
            assert answer == uncached(model, tokenizer, messages, max_tokens=5)
            messages.append({"role": "assistant", "content": answer})
        assert conversation.reused_tokens > 0
        before = [*messages[:4], {"role": "user", "content": "two"}]
        assert conversation.reused_tokens <= len(tokenizer.apply_chat_template(before))
    finally:
        tokenizer.chat_template = template


def test_reset_forgets_all_but_the_system_prompt(random_model):
    model, tokenizer = random_model
    conversation = Conversation(model, tokenizer, "S")
    first = ask(conversation, "hello", max_tokens=4)
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "S"}]
    assert ask(conversation, "hello", max_tokens=4) == first
    assert conversation.reused_tokens == 0


def test_an_interrupted_answer_is_kept_as_far_as_it_came(random_model):
    model, tokenizer = random_model
    conversation = Conversation(model, tokenizer)
    responses = conversation.ask("hello", max_tokens=50)
    text = next(responses).text + next(responses).text
    responses.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": text}
    messages = [*conversation.messages, {"role": "user", "content": "go on"}]
    assert ask(conversation, "go on", max_tokens=4) == uncached(model, tokenizer, messages, max_tokens=4)


def test_a_failed_turn_leaves_the_conversation_as_it_was(random_model):
    model, tokenizer = random_model
    conversation = Conversation(model, tokenizer)
    ask(conversation, "hello", max_tokens=3)
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="context is 4096"):
        ask(conversation, "x" * 5000)
    assert conversation.messages == before
    messages = [*before, {"role": "user", "content": "on"}]
    assert ask(conversation, "on", max_tokens=3) == uncached(model, tokenizer, messages, max_tokens=3)


def test_command(chat, scripted):
    code, out, err = chat(["hi", "", "h", "r", "hi", "q", "never read"], "--model", scripted)
    assert (code, err) == (0, "")
    assert out.count("> alpha \U0001f600 beta\n[4 tokens, ") == 2
    assert out.count("commands: q to leave") == 2
    assert "The conversation starts anew." in out


@pytest.mark.parametrize("lines", [[], ["hi"]], ids=["at-once", "after-an-answer"])
def test_end_of_input_leaves(chat, scripted, lines):
    code, out, err = chat(lines, "--model", scripted)
    assert (code, err, out[-1]) == (0, "", "\n")


def test_ctrl_c_ends_the_answer_and_not_the_chat(chat, scripted, monkeypatch):
    from lily_mlx import conversation

    count = 0

    def interrupted(*arguments, **options):
        nonlocal count
        for response in stream(*arguments, **options):
            yield response
            count += 1
            if count == 2:
                raise KeyboardInterrupt

    stream = conversation.stream_generate
    monkeypatch.setattr(conversation, "stream_generate", interrupted)
    code, out, err = chat(["hi", "q"], "--model", scripted)
    assert (code, err) == (0, "")
    assert "> alpha \U0001f600\n[2 tokens, " in out
    assert "; interrupted]" in out


def test_max_tokens_and_sampling(chat, scripted):
    code, out, _ = chat(["hi"], "--model", scripted, "-m", 1, "--temp", 0.5, "--top-p", 0.9, "--seed", 3)
    assert code == 0
    assert "\n[1 tokens, " in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-kv-size", "8"], "--max-kv-size is not supported"),
        (["--pipeline"], "--pipeline is not supported"),
        (["-m", "0"], "--max-tokens is 0"),
        (["--temp", "-1"], "temperature -1"),
        (["--adapter-path", "missing"], "adapter path does not exist"),
    ],
    ids=lambda a: a[0] if isinstance(a, list) else "",
)
def test_refuses(chat, scripted, arguments, words):
    code, _, err = chat(["q"], "--model", scripted, *arguments)
    assert code == 1
    assert words in err


def test_an_error_in_a_turn_does_not_end_the_chat(chat, scripted):
    code, out, err = chat(["x" * 5000, "hi", "q"], "--model", scripted)
    assert code == 0
    assert "context is 4096" in err
    assert "> alpha" in out


def test_seeds_repeat(chat, tmp_path):
    ids = write_tokenizer(tmp_path)
    synthetic.write_checkpoint(tmp_path, synthetic.config(eos_token_id=ids[EOS]))

    def run(seed):
        out = chat(["hi", "r", "hi"], "--model", tmp_path, "--temp", 1, "-m", 8, "--seed", seed)[1]
        return [part.rpartition("\n[")[0] for part in out.split("> ")]

    assert run(1) == run(1) != run(2)
