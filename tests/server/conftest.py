"""Servers that the tests share. Without the packages of the extra `test` these tests are left out, with a notice."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest

from lily_mlx.checkpoints import bundled_checkpoint
from tests.model.scripted import write_scripted

MISSING = [name for name in ("httpx", "openai", "starlette", "uvicorn") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str | None:
    return f"tests/server is left out: {', '.join(MISSING)} missing" if MISSING else None


@pytest.fixture(scope="session")
def tiny():
    from .support import serving

    with serving(bundled_checkpoint()) as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory):
    """Gives a server whose every answer is a script, at token borders of choice."""
    from .support import serving

    with contextlib.ExitStack() as stack:
        servers = {}

        def serve(*script: str, thinking: bool = False):
            if (script, thinking) not in servers:
                directory = tmp_path_factory.mktemp("scripted")
                write_scripted(directory, script)
                if thinking:  # prompts end with an open think block
                    template = directory / "chat_template.jinja"
                    ask = "<|im_start|>assistant\n"
                    assert ask in template.read_text()
                    template.write_text(template.read_text().replace(ask, ask + "<think>\n"))
                servers[script, thinking] = stack.enter_context(serving(directory))
            return servers[script, thinking]

        yield serve
