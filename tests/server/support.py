"""Servers in this process, each on a port of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import uvicorn

from lily_mlx import load
from lily_mlx.server.app import Server, Settings
from lily_mlx.server.disk_cache import DiskCache
from lily_mlx.server.worker import Limits, Worker


def wait_until(condition, seconds: float = 20.0) -> None:
    """Waits for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@dataclass
class Client:
    """Asks a server."""

    address: str

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)

    def post(self, path: str = "/v1/chat/completions", **body) -> httpx.Response:
        return httpx.post(self.address + path, json=body, timeout=120)

    def ask(self, content: str = "hello", **body) -> httpx.Response:
        return self.post(messages=[{"role": "user", "content": content}], **body)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.address + path, timeout=30)


@dataclass
class Running(Client):
    """A server in this process."""

    worker: Worker
    http: uvicorn.Server


@dataclass
class Started(Client):
    """A server in a process of its own."""

    process: subprocess.Popen
    log: list[str]

    def metric(self, name: str) -> float:
        """A figure of /metrics."""
        return next(float(line.split()[1]) for line in self.get("/metrics").text.splitlines() if line.startswith(name))


@contextlib.contextmanager
def started(*flags: str):
    """Starts the command with the bundled checkpoint; kills it at the end of the block."""
    command = [sys.executable, "-m", "lily_mlx", "server", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        log: list[str] = []
        for line in process.stderr:
            log.append(line)
            if "running on" in line:
                break
        else:
            raise AssertionError("".join(log))
        reader = threading.Thread(target=lambda: log.extend(process.stderr), daemon=True)
        reader.start()
        yield Started(line.split("running on ")[1].split()[0], process, log)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def serving(directory: Path, limits: Limits | None = None, disk: DiskCache | None = None, **settings):
    """Serves a checkpoint inside the block."""
    worker = Worker(lambda: load(directory), limits, disk)
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
