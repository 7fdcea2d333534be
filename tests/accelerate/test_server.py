"""mlx_lm's own server with an accelerated model."""

from __future__ import annotations

import argparse
import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer

import pytest
from mlx_lm import server

from lily_mlx import accelerate
from tests.model import synthetic
from tests.model.scripted import EOS
from tests.model.tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def post(tmp_path_factory, request):
    """Sends a body to a server that runs in this process; returns the parsed answer."""
    directory = tmp_path_factory.mktemp("random")
    ids = write_tokenizer(directory)
    # No ids beyond the tokenizer's, and all experts chosen.
    settings = synthetic.config(eos_token_id=ids[EOS], vocab_size=259, num_experts_per_tok=8)
    synthetic.write_checkpoint(directory, settings)
    patch = pytest.MonkeyPatch()
    load, kinds = server.load, []

    def load_accelerated(*arguments, **options):
        model, *rest = load(*arguments, **options)
        kinds.append(accelerate(model))
        return kinds[-1], *rest

    patch.setattr(server, "load", load_accelerated)
    args = argparse.Namespace(
        model=str(directory),
        adapter_path=None,
        draft_model=None,
        num_draft_tokens=3,
        trust_remote_code=False,
        chat_template="",
        use_default_chat_template=False,
        chat_template_args={},
        temp=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_tokens=12,
        decode_concurrency=32,
        prompt_concurrency=8,
        prefill_step_size=2048,
        prompt_cache_size=10,
        prompt_cache_bytes=None,
        kv_bits=None,
        kv_group_size=64,
        quantized_kv_start=0,
        pipeline=False,
        allowed_origins="*",
    )
    generator = server.ResponseGenerator(server.ModelProvider(args), server.LRUPromptCache(10))

    def handler(*arguments, **options):
        return server.APIHandler(generator, *arguments, system_fingerprint="test", **options)

    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()

    def send(**body):
        address = f"http://127.0.0.1:{http.server_port}/v1/chat/completions"
        data = json.dumps(body).encode()
        query = urllib.request.Request(address, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(query, timeout=120) as answer:
            return json.loads(answer.read())

    yield send
    http.shutdown()
    http.server_close()
    generator.stop_and_join()
    patch.undo()
    assert kinds
    assert all(hasattr(model, "lily_model") for model in kinds)


def text(answer):
    return answer["choices"][0]["message"]["content"]


def messages(content):
    return [{"role": "user", "content": content}]


def test_answers_repeat_and_the_prefix_is_reused(post):
    first = post(messages=messages("hello"), max_tokens=8)
    again = post(messages=messages("hello"), max_tokens=8)
    assert text(first) == text(again)
    assert first["usage"]["completion_tokens"] == again["usage"]["completion_tokens"] == 8
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_c87_requests_at_once_equal_solo_requests(post):
    contents = ["a" * count for count in (12, 3, 1, 26, 10)]
    alone = [text(post(messages=messages(content), max_tokens=4 + i)) for i, content in enumerate(contents)]
    with ThreadPoolExecutor(5) as pool:
        together = pool.map(
            lambda item: text(post(messages=messages(item[1]), max_tokens=4 + item[0])), enumerate(contents)
        )
        assert list(together) == alone


def test_c21_seeds(post):
    def ask(seed):
        return text(post(messages=messages("seeded"), max_tokens=8, temperature=1.0, seed=seed))

    assert ask(1) == ask(1) != ask(2)


def test_a_conversation(post):
    turns = messages("one")
    answer = text(post(messages=turns, max_tokens=6))
    turns += [{"role": "assistant", "content": answer}, *messages("two")]
    second = post(messages=turns, max_tokens=6)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert text(second) == text(post(messages=turns, max_tokens=6))
