"""Servers in this process, each on a port of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import uvicorn

from lily_mlx import load
from lily_mlx.server.app import Server, Settings
from lily_mlx.server.worker import Limits, Worker


@dataclass
class Running:
    """A server that answers."""

    address: str
    worker: Worker
    http: uvicorn.Server

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)

    def post(self, path: str = "/v1/chat/completions", **body) -> httpx.Response:
        return httpx.post(self.address + path, json=body, timeout=120)

    def ask(self, content: str = "hello", **body) -> httpx.Response:
        return self.post(messages=[{"role": "user", "content": content}], **body)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.address + path, timeout=30)


@contextlib.contextmanager
def serving(directory: Path, limits: Limits | None = None, **settings):
    """Serves a checkpoint inside the block."""
    worker = Worker(lambda: load(directory), limits)
    worker.start()
    app = Server(worker, Settings(**{"model_name": "tiny", **settings})).application()
    http = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    while not http.started:
        time.sleep(0.01)
    port = http.servers[0].sockets[0].getsockname()[1]
    yield Running(f"http://127.0.0.1:{port}", worker, http)
    http.should_exit = True
    thread.join(20)
    worker.stop()
    assert not thread.is_alive()
