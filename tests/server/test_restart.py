"""Prompt tokens that are computed, turn by turn, and by a server that was started again."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

from lily_mlx.checkpoints import bundled_checkpoint

from .support import started

SYSTEM = {"role": "system", "content": "You are a sentinel on the walls of Elsinore. " + "Answer in verse. " * 30}
FIRST = [SYSTEM, {"role": "user", "content": "Who is there?"}]
SECOND = [
    *FIRST,
    {"role": "assistant", "content": "Nay, answer me."},
    {"role": "user", "content": "Long live the King!"},
]
EDITED = [*SECOND[:-1], {"role": "user", "content": "Bernardo?"}]
OTHER = [SYSTEM, {"role": "user", "content": "'Tis bitter cold."}]


def ask(server, messages):
    """The text, the tokens of the prompt and those of them that were computed, by both accounts of the server."""
    before = server.metric("lily_prompt_tokens_computed_total")
    answer = server.post(messages=messages, max_tokens=2).json()
    usage = answer["usage"]
    computed = int(server.metric("lily_prompt_tokens_computed_total") - before)
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - computed
    message = answer["choices"][0]["message"]
    return message["content"] + message.get("reasoning_content", ""), usage["prompt_tokens"], computed


def wait_for_writes(server, count):
    end = time.monotonic() + 30
    while server.metric("lily_prefix_cache_disk_writes_total") < count:
        assert time.monotonic() < end, server.get("/metrics").text
        time.sleep(0.05)


@pytest.mark.parametrize(
    "end", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL], ids=["terminated", "killed"]
)
def test_computed_tokens_before_and_after_a_restart(tmp_path, end):
    flags = ("--prompt-cache-dir", str(tmp_path / "cache"))
    with started(*flags) as server:
        text, size, computed = ask(server, FIRST)
        assert computed == size > 150
        layout = ask(server, FIRST)[2]  # what the template puts after the question
        assert layout < 20
        again = ask(server, SECOND)
        assert again[2] == again[1] - (size - layout)
        edited = ask(server, EDITED)
        assert edited[2] < 20 + layout
        shared = ask(server, OTHER)
        assert shared[2] < 20 + layout
        wait_for_writes(server, 3)
        server.process.send_signal(end)
        server.process.wait(30)
    with started(*flags) as server:
        # Another first prompt than before, so that each finds its own snapshot.
        assert ask(server, OTHER) == (shared[0], shared[1], layout)
        assert server.metric("lily_prefix_cache_disk_reads_total") == 1
        assert ask(server, FIRST)[0] == text
        assert ask(server, SECOND)[:2] == again[:2]
        assert ask(server, SECOND)[2] == layout
        assert ask(server, EDITED) == edited
        assert server.metric("lily_prefix_cache_disk_errors_total") == 0


def test_a_server_learns_from_another_on_the_same_directory(tmp_path):
    flags = ("--prompt-cache-dir", str(tmp_path / "cache"))
    with started(*flags) as first, started(*flags) as second:
        text, size, computed = ask(first, FIRST)
        assert computed == size
        wait_for_writes(first, 2)
        assert ask(second, FIRST)[0] == text
        assert ask(second, OTHER)[2] < 60
        assert second.metric("lily_prefix_cache_disk_reads_total") == 2


@pytest.mark.slow
def test_another_checkpoint_starts_from_nothing(tmp_path):
    """The same directory, after the weights have changed."""
    model = tmp_path / "model"
    shutil.copytree(bundled_checkpoint(), model)
    flags = ("--model", str(model), "--prompt-cache-dir", str(tmp_path / "cache"))
    with started(*flags) as server:
        ask(server, OTHER)
        wait_for_writes(server, 1)
    os.utime(model / "model.safetensors", (1, 1))
    with started(*flags) as server:
        _, size, computed = ask(server, OTHER)
        assert computed == size
