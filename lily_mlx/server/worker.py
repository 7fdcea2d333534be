"""`Worker`: the one thread that uses the GPU, and the queue before it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from lily_mlx.engine import DEFAULT_CHUNK_SIZE, Chosen, DecodeBatch, Engine
from lily_mlx.model import Model

from .disk_cache import DiskCache
from .errors import busy, internal, unavailable
from .prefix_cache import PrefixCache
from .sequence import Sequence as Answer

logger = logging.getLogger("lily_mlx")

_IDLE_SECONDS = 0.5  # between two signs of life while there is nothing to do
_STALLED_SECONDS = 300.0  # without the end of a step or a chunk
_CLEAR_EVERY = 256  # turns between returns of unused buffers to the system


@dataclass(frozen=True)
class Limits:
    """What the worker takes on.

    Attributes:
        decode_concurrency: answers that are generated at once.
        prompt_concurrency: prompts among them that are processed in turns.
        waiting: answers that may wait besides.
        chunk_size: tokens of a prompt that go through the layers at once.
        cache_bytes, cache_snapshots: see `PrefixCache`.
    """

    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    waiting: int = 256
    chunk_size: int = DEFAULT_CHUNK_SIZE
    cache_bytes: int = 8 * 10**9
    cache_snapshots: int | None = None


class Worker:
    """Loads the model and generates answers, all on a thread of its own.

    A turn is one chunk of one prompt and one step of each answer; two or more answers advance in one step together. An
    error in one answer's part of a turn ends that answer alone. An error in a common step ends none: its answers go on
    one by one.

    Args:
        load: returns mlx_lm's kind of (model, tokenizer), such as `lily_mlx.load` does.
        limits: see `Limits`.
        disk: where the prefix cache keeps snapshots as well; None for nowhere.
    """

    def __init__(
        self, load: Callable[[], tuple[Any, Any]], limits: Limits | None = None, disk: DiskCache | None = None
    ):
        self.limits = limits or Limits()
        self.cache = PrefixCache(self.limits.cache_bytes, self.limits.cache_snapshots, disk)
        self.model: Model | None = None
        self.tokenizer: Any = None
        self.turns = 0
        self.computed_tokens = self.cached_tokens = self.generated_tokens = 0
        self._load = load
        self._changed = threading.Condition()
        self._waiting: deque[Answer] = deque()
        self._active: list[Answer] = []
        self._next_prompt = 0
        self._stopping = False
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._sign_of_life = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)

    def start(self) -> None:
        """Starts the thread and waits until the model is loaded and answers can be generated.

        Raises:
            Exception: what the loading, or what makes ready after it, raised.
        """
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def stop(self, seconds: float = 10.0) -> None:
        """Ends all answers and the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)
        if self.cache.disk is not None:
            self.cache.disk.close(seconds)

    def submit(self, answers: Sequence[Answer]) -> None:
        """Puts answers into the queue, all or none.

        Raises:
            RequestError: 429 if the queue is full, 503 if the thread has ended.
        """
        with self._changed:
            if self.problem is not None:
                raise unavailable(self.problem)
            free = self.limits.decode_concurrency - len(self._active)
            if len(self._waiting) + len(answers) > self.limits.waiting + max(free, 0):
                raise busy(len(self._waiting))
            self._waiting.extend(answers)
            self._changed.notify()

    @property
    def problem(self) -> str | None:
        """Why nothing can be generated; None if all is well."""
        if self._stopping:
            return "the server is shutting down"
        if self._error is not None or not self._thread.is_alive():
            return f"the GPU thread has ended ({self._error!r}): restart the server"
        if self.running and self.idle_seconds > _STALLED_SECONDS:
            return f"the GPU thread has finished nothing for {self.idle_seconds:.0f} seconds"
        return None

    @property
    def running(self) -> int:
        """Answers that are generated now."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Answers in the queue."""
        return len(self._waiting)

    @property
    def idle_seconds(self) -> float:
        """Since the last sign of life."""
        return time.monotonic() - self._sign_of_life

    def _run(self) -> None:
        try:
            model, self.tokenizer = self._load()
            self.model = model
            engine = Engine(model)
            batch = DecodeBatch(engine)
            self.cache.start(engine.empty())
            self._ready.set()
            while self._turn(engine, batch):
                pass
        except BaseException as error:
            self._error = error
            logger.error("the GPU thread has ended: %r", error)
        finally:
            self._ready.set()
            with self._changed:
                left = [*self._active, *self._waiting]
                self._active, self._waiting = [], deque()
            reason = self.problem or "the server is shutting down"
            for answer in left:
                answer.fail(unavailable(reason))

    def _turn(self, engine: Engine, batch: DecodeBatch) -> bool:
        """One turn; returns False when the thread has to end."""
        self._sign_of_life = time.monotonic()
        with self._changed:
            if not (self._stopping or self._waiting or self._active):
                self._changed.wait(_IDLE_SECONDS)
            if self._stopping:
                return False
            self._admit()
        prompts = [answer for answer in self._active if not answer.decoding]
        if prompts:
            self._next_prompt = (self._next_prompt + 1) % len(prompts)
            answer = prompts[self._next_prompt]
            self._guarded(answer, lambda: answer.prefill(engine, self.cache, self.limits.chunk_size))
            self._sign_of_life = time.monotonic()
        self._decode(engine, batch)
        ended = [answer for answer in self._active if answer.done or answer.cancelled]
        for answer in ended:
            answer.leave(batch)
            answer.release()
        self._active = [answer for answer in self._active if answer not in ended]
        self.turns += 1
        if self.turns % _CLEAR_EVERY == 0:
            mx.clear_cache()
        return True

    def _decode(self, engine: Engine, batch: DecodeBatch) -> None:
        """One step of each answer, of two or more together."""
        running = [answer for answer in self._active if answer.decoding and not (answer.done or answer.cancelled)]
        together = [answer for answer in running if not (answer.alone or answer.is_last(engine))]
        if len(together) < 2:
            together = []
        for answer in running:
            if answer not in together:
                self._guarded(answer, lambda answer=answer: answer.leave(batch))  # type: ignore[misc]
            elif answer.handle is None:
                self._guarded(answer, lambda answer=answer: answer.join(batch))  # type: ignore[misc]
        together = [answer for answer in together if answer.handle is not None]
        chosen: dict[int, Chosen] = {}
        try:
            if together:
                chosen = batch.step()
        except Exception:
            logger.exception("a step of %d answers failed; they go on one by one", len(together))
            for answer in together:
                answer.alone = True
                self._guarded(answer, lambda answer=answer: answer.leave(batch))  # type: ignore[misc]
            together = []
        for answer in running:
            if answer in together and answer.handle is not None:
                one = chosen[answer.handle]
                self._guarded(answer, lambda a=answer, one=one: a.take(one, batch, self.cache))  # type: ignore[misc]
            elif not answer.done:
                self._guarded(answer, lambda answer=answer: answer.step(engine, self.cache))  # type: ignore[misc]

    def _admit(self) -> None:
        """Takes answers from the queue, as far as the limits allow."""
        if any(answer.cancelled for answer in self._waiting):
            self._waiting = deque(answer for answer in self._waiting if not answer.cancelled)
        prompts = sum(not answer.decoding for answer in self._active)
        # Answers that were cancelled since are dropped at the turn's end, where the batch lets them go.
        while self._waiting and len(self._active) < self.limits.decode_concurrency:
            if prompts >= self.limits.prompt_concurrency:
                return
            self._active.append(self._waiting.popleft())
            prompts += 1

    def _guarded(self, answer: Answer, action: Callable[[], None]) -> None:
        """One answer's part of a turn; its error is its own."""
        if answer.cancelled:
            return
        before = answer.computed_tokens, answer.generated_tokens
        try:
            action()
        except Exception as error:
            logger.exception("an answer failed")
            answer.fail(internal(error))
        self.computed_tokens += answer.computed_tokens - before[0]
        self.generated_tokens += answer.generated_tokens - before[1]
        if answer.decoding and before[1] == 0 and answer.generated_tokens:
            self.cached_tokens += len(answer.prompt.tokens) - answer.computed_tokens
