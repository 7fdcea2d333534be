"""Many requests of mixed lengths to one server, and a check that nothing of them is left.

    python -m tools.soak --requests 10000

Starts `lily_mlx.server` with a small prefix cache, in memory and on disk, and sends chats and completions, whole and as
streams, conversations of several turns, several choices, wrong requests and clients that go away. Twenty times in
between it waits until the server is idle, and reads:

- arrays: bytes of live MLX arrays without those of the prefix cache,
- the prefix cache's bytes, in memory and on disk, which must stay in their budgets,
- resident memory of the process, threads, open files,
- the time of one plain request, whose text must always be the same.

After the first quarter, in which buffers, compiled steps and caches fill, none of the figures may grow. Exit code 1 if
one does.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields

SAMPLES = 20
CACHE_BYTES = 30_000_000
DISK_BYTES = 60_000_000
PLAIN = {"messages": [{"role": "user", "content": "Who is there?"}], "max_tokens": 3}
WORDS = [
    "Who",
    "is",
    "there",
    "Nay",
    "answer",
    "me",
    "stand",
    "and",
    "unfold",
    "yourself",
    "long",
    "live",
    "the",
    "King",
    "Bernardo",
    "He",
]
TOOLS = [
    {"type": "function", "function": {"name": "watch", "parameters": {"properties": {"hour": {"type": "integer"}}}}}
]


@dataclass(frozen=True)
class Sample:
    """Figures of an idle server after a number of requests. Bytes, counts and seconds."""

    requests: int
    arrays: int
    cache: int
    disk: int
    resident: int
    threads: int
    files: int
    plain: float


# How much the later samples may be above the earlier ones, by name.
ALLOWED = {"arrays": 100_000, "resident": 30_000_000, "threads": 0, "files": 2}


def grown(samples: Sequence[Sample]) -> list[str]:
    """What grew: the median of the last quarter against that of the second one, a line for each."""
    quarter = len(samples) // 4
    problems = []
    for name, allowed in ALLOWED.items():
        values = [getattr(sample, name) for sample in samples]
        before, after = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
        if after > before + allowed:
            problems.append(f"{name} grew from {before:g} to {after:g}, allowed is {allowed:g} more")
    for name, budget in (("cache", CACHE_BYTES), ("disk", DISK_BYTES + 5_000_000)):  # a file more, for a moment
        most = max(getattr(sample, name) for sample in samples)
        if most > budget:
            problems.append(f"{name} has {most} bytes, its budget is {budget}")
    return problems


class Client:
    """Sends requests and counts their statuses.

    Args:
        port: of the server on this machine.
        seed: of the requests.
    """

    def __init__(self, port: int, seed: int):
        self.statuses: Counter[int | str] = Counter()
        self._port, self._seed = port, seed
        self._lock = threading.Lock()

    def get(self, path: str) -> str:
        """The body of an answer."""
        return self._send("GET", path, None)[1].decode()

    def plain(self) -> tuple[str, float]:
        """The text of the plain request, and its time in seconds."""
        start = time.perf_counter()
        status, body = self._send("POST", "/v1/chat/completions", PLAIN)
        assert status == 200, body
        message = json.loads(body)["choices"][0]["message"]
        return f"{message.get('reasoning_content')}|{message['content']}", time.perf_counter() - start

    def request(self, number: int) -> None:
        """Sends the request of a number."""
        draw = random.Random(f"{self._seed} {number}")
        kind = draw.choices(("chat", "turns", "completion", "wrong", "gone"), (5, 2, 3, 1, 1))[0]
        outcome: int | str
        if kind == "wrong":
            outcome = self._send("POST", "/v1/chat/completions", draw.choice((
                {}, {"messages": [{"role": "x"}]}, {**PLAIN, "stop": 5}, {**PLAIN, "tools": [{}]}, {**PLAIN, "temperature": -1}
            )))[0]  # fmt: skip
        elif kind == "gone":
            self._leave(draw)
            outcome = "gone"
        elif kind == "completion":
            prompt = [draw.randrange(1000) for _ in range(draw.choice((1, 2, 3, 140 if number % 40 == 0 else 5)))]
            outcome = self._send("POST", "/v1/completions", {"prompt": prompt, **self._options(draw)})[0]
        else:
            messages = [{"role": "system", "content": draw.choice(("Be brief.", "Speak in verse."))}]
            for _ in range(draw.randint(2, 3) if kind == "turns" else 1):
                text = " ".join(draw.choices(WORDS, k=draw.choice((1, 1, 1, 5))))
                messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "Ay."}]
            outcome = self._send("POST", "/v1/chat/completions", {"messages": messages[:-1], **self._options(draw)})[0]
        with self._lock:
            self.statuses[outcome] += 1

    def _options(self, draw: random.Random) -> dict[str, object]:
        options: dict[str, object] = {"max_tokens": draw.randint(1, 3), "stream": draw.random() < 0.5}
        extra: list[dict[str, object]] = [
            {"temperature": 1.0, "seed": draw.randrange(100)},
            {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
            {"n": 2},
            {"stop": ["lord", "\n\n"]},
            {"logit_bias": {"7": 5}},
            {"tools": TOOLS},
            {},
            {},
        ]
        return options | draw.choice(extra)

    def _send(self, method: str, path: str, body: object) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read()

    def _leave(self, draw: random.Random) -> None:
        """A stream that is left after its first bytes, or at once."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", json.dumps({**PLAIN, "max_tokens": 500, "stream": True}))
            if draw.random() < 0.5:
                connection.getresponse().read(10)


@contextlib.contextmanager
def server(flags: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server's process and port."""
    command = [sys.executable, "-m", "lily_mlx", "server", "--port", "0", "--prompt-cache-bytes", str(CACHE_BYTES)]
    command += ["--prompt-cache-disk-bytes", str(DISK_BYTES), "--shutdown-seconds", "5", *flags]
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [*command, "--prompt-cache-dir", directory], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        try:
            log = []
            for line in process.stderr:
                log.append(line)
                if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
                    break
            else:
                raise RuntimeError("the server did not start:\n" + "".join(log))
            threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True).start()
            yield process, int(found[1])
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def sample(client: Client, process: subprocess.Popen[str], requests: int, text: str) -> Sample:
    """Waits until the server is idle, and reads the figures.

    Raises:
        RuntimeError: the server does not become idle, or a plain request has another text than at the beginning.
    """
    for _ in range(1000):
        health = json.loads(client.get("/health"))
        if not health["running"] and not health["waiting"]:
            break
        time.sleep(0.03)
    else:
        raise RuntimeError(f"the server does not become idle: {health}")
    now, seconds = client.plain()
    if now != text:
        raise RuntimeError(f"after {requests} requests a plain one is answered with {now!r}, before it was {text!r}")
    time.sleep(0.3)  # what was just taken is let go, and written
    figures = dict(re.findall(r"^(\w+) (\d\S*)$", client.get("/metrics"), re.MULTILINE))
    cache = int(figures["lily_prefix_cache_bytes"])
    resident = subprocess.run(["ps", "-o", "rss=", "-p", str(process.pid)], capture_output=True, text=True, check=True)
    return Sample(
        requests,
        int(figures["lily_mlx_active_bytes"]) - cache,
        cache,
        int(figures["lily_prefix_cache_disk_bytes"]),
        int(resident.stdout) * 1024,
        int(figures["lily_threads"]),
        int(figures["lily_open_files"]),
        round(seconds, 3),
    )


def soak(
    requests: int, seconds: float, at_once: int, seed: int, flags: Sequence[str] = (), parts: int = SAMPLES
) -> tuple[int, list[str]]:
    """Runs it, and prints the samples.

    Args:
        requests: to send; in a shorter time than they need, fewer.
        seconds: no new requests after this time.
        at_once: clients.
        seed: of the requests.
        flags: more of the server's.
        parts: number of samples.

    Returns:
        The number of requests that were sent, and what went wrong.
    """
    samples: list[Sample] = []
    with server(flags) as (process, port):
        client = Client(port, seed)
        text, _ = client.plain()
        start, done = time.monotonic(), 0
        print(" ".join(f"{field.name:>12}" for field in fields(Sample)), flush=True)
        for part in range(parts):
            share = requests * (part + 1) // parts
            with ThreadPoolExecutor(at_once) as pool:
                for number in range(done, share):
                    pool.submit(_within, client, number, start + seconds * (part + 1) / parts)
            done = sum(client.statuses.values())
            samples.append(sample(client, process, done, text))
            print(" ".join(f"{value:>12}" for value in astuple(samples[-1])), flush=True)
        print(f"seed {seed}, {time.monotonic() - start:.0f} seconds, statuses {dict(client.statuses)}")
        wrong = [status for status in client.statuses if status not in (200, 400, "gone")]
    return done, grown(samples) + ([f"answers with the statuses {wrong}"] if wrong else [])


def _within(client: Client, number: int, deadline: float) -> None:
    if time.monotonic() < deadline:
        try:
            client.request(number)
        except (OSError, http.client.HTTPException) as error:
            client.statuses[repr(error)] += 1


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description="Many requests to one server")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="an end for slow machines (default: none)")
    parser.add_argument("--at-once", type=int, default=4, help="clients (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default: 0)")
    parser.add_argument("--backend", choices=("metal", "cuda", "cpu"), help="where the kernels run")
    args = parser.parse_args(arguments)
    flags = ["--backend", args.backend] if args.backend else []
    done, problems = soak(args.requests, args.seconds, args.at_once, args.seed, flags)
    print(f"{done} requests: " + ("; ".join(problems) if problems else "nothing grew"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
