"""Counters of the server in Prometheus' text format."""

from __future__ import annotations

import os
import threading
from collections import Counter

import mlx.core as mx

from .worker import Worker

_FIRST_TOKEN_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """What the HTTP side counts; the rest is read from the worker."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._first_token = [0] * (len(_FIRST_TOKEN_BUCKETS) + 1)
        self._first_token_sum = 0.0
        self.cancelled = 0

    def request(self, path: str, status: int) -> None:
        """Counts an answered request."""
        self._requests[path, status] += 1

    def first_token(self, seconds: float) -> None:
        """Records the time from a request to its first event."""
        slot = sum(seconds > bound for bound in _FIRST_TOKEN_BUCKETS)
        self._first_token[slot] += 1
        self._first_token_sum += seconds

    def text(self, worker: Worker) -> str:
        """All figures."""
        cache = worker.cache
        lines: list[str] = []

        def add(name: str, kind: str, help_text: str, value: float) -> None:
            lines.extend([f"# HELP lily_{name} {help_text}", f"# TYPE lily_{name} {kind}", f"lily_{name} {value:g}"])

        def exact(name: str, kind: str, help_text: str, value: int) -> None:
            lines.extend([f"# HELP lily_{name} {help_text}", f"# TYPE lily_{name} {kind}", f"lily_{name} {value}"])

        exact("up", "gauge", "1 while answers can be generated.", int(worker.problem is None))
        exact("answers_running", "gauge", "Answers that are generated now.", worker.running)
        exact("answers_waiting", "gauge", "Answers in the queue.", worker.waiting)
        exact("prompt_tokens_computed_total", "counter", "Tokens of prompts computed.", worker.computed_tokens)
        exact("prompt_tokens_cached_total", "counter", "Tokens of prompts taken from the cache.", worker.cached_tokens)
        exact("tokens_generated_total", "counter", "Tokens generated.", worker.generated_tokens)
        exact("answers_cancelled_total", "counter", "Requests whose client went away.", self.cancelled)
        exact("prefix_cache_bytes", "gauge", "Bytes of the snapshots, shared arrays once.", cache.bytes)
        exact("prefix_cache_snapshots", "gauge", "Snapshots in the prefix cache.", cache.snapshots)
        exact("prefix_cache_evictions_total", "counter", "Snapshots dropped for the budget.", cache.evictions)
        if cache.disk is not None:
            disk = cache.disk
            exact("prefix_cache_disk_bytes", "gauge", "Bytes of the prefix cache on disk.", disk.bytes)
            exact("prefix_cache_disk_reads_total", "counter", "Snapshots read from disk.", disk.reads)
            exact("prefix_cache_disk_writes_total", "counter", "Snapshots written to disk.", disk.writes)
            exact("prefix_cache_disk_skipped_total", "counter", "Snapshots that were not written.", disk.skipped)
            exact("prefix_cache_disk_errors_total", "counter", "Files not written or not read.", disk.errors)
        add("gpu_thread_idle_seconds", "gauge", "Since the GPU thread's last sign of life.", worker.idle_seconds)
        exact(
            "mlx_active_bytes", "gauge", "Bytes of the arrays that are alive, weights included.", mx.get_active_memory()
        )
        exact("mlx_buffer_bytes", "gauge", "Bytes of buffers that MLX keeps for new arrays.", mx.get_cache_memory())
        exact("threads", "gauge", "Python threads of the process.", threading.active_count())
        exact("open_files", "gauge", "Open files and sockets of the process.", _open_files())
        lines += ["# HELP lily_requests_total Answered requests.", "# TYPE lily_requests_total counter"]
        for (path, status), count in sorted(self._requests.items()):
            lines.append(f'lily_requests_total{{path="{path}",status="{status}"}} {count}')
        lines += [
            "# HELP lily_first_token_seconds From a request to its first token.",
            "# TYPE lily_first_token_seconds histogram",
        ]
        total = 0
        for bound, count in zip((*_FIRST_TOKEN_BUCKETS, "+Inf"), self._first_token, strict=True):
            total += count
            lines.append(f'lily_first_token_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"lily_first_token_seconds_sum {self._first_token_sum:g}", f"lily_first_token_seconds_count {total}"]
        return "\n".join(lines) + "\n"


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0
