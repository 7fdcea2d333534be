"""The HTTP application: endpoints, streams, errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lily_mlx.engine import Engine, make_sampling

from .constraints import Constraint, Grammars
from .errors import RequestError, internal
from .metrics import Metrics
from .prompts import Prompt, make_prompts
from .protocol import Defaults, Request, parse_json, parse_request
from .reasoning import ChannelSplitter
from .responses import Choice, Responses, dumps
from .sequence import Event, Finished, Sequence
from .text import AnswerText, TokenTexts
from .worker import Worker

logger = logging.getLogger("lily_mlx")

KEEP_ALIVE_SECONDS = 10.0
_LONGEST_WARNING = 500

# A sampling that only chooses: a bias of nothing makes it one with controls.
CHANGES_OF_LOGITS = {
    "logit_bias": {0: 0.0},
    "repetition_penalty": None,
    "presence_penalty": None,
    "frequency_penalty": None,
}


@dataclass(frozen=True)
class Settings:
    """Settings of the HTTP side.

    Attributes:
        model_name: listed by /v1/models and accepted in requests.
        defaults: of requests.
        template_options: of the chat template.
        allowed_origins: for browsers.
        max_body_bytes: of a request.
    """

    model_name: str
    defaults: Defaults = field(default_factory=Defaults)
    template_options: dict[str, Any] = field(default_factory=dict)
    allowed_origins: tuple[str, ...] = ("*",)
    max_body_bytes: int = 32 * 10**6


class Server:
    """The endpoints over a worker that has started.

    Args:
        worker: generates.
        settings: see `Settings`.
    """

    def __init__(self, worker: Worker, settings: Settings):
        self.worker, self.settings = worker, settings
        self.metrics = Metrics()
        self._created = int(time.time())
        # Tokenizers and templates are not made for several threads, and long prompts would hold up the event loop.
        self._text_thread = ThreadPoolExecutor(1, "text")
        self._disk_thread = ThreadPoolExecutor(1, "prompt-cache-reader")
        assert worker.model is not None
        self._engine = Engine(worker.model)
        self._tokenizer = worker.tokenizer
        self._token_texts = TokenTexts(worker.tokenizer)
        self._grammars = Grammars(worker.tokenizer, worker.model.config.vocab_size)
        template = getattr(worker.tokenizer, "chat_template", None)
        self._thinks = worker.tokenizer.has_thinking or (isinstance(template, str) and "<think>" in template)
        # No token is longer than the longest; normalisation can make a text a few times shorter.
        longest = max(map(len, worker.tokenizer.get_vocab()), default=1)
        self._most_characters = 4 * longest * worker.model.config.max_positions
        self._fingerprint = _fingerprint()

    def application(self) -> Starlette:
        """The ASGI application."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.worker.stop)
            self._text_thread.shutdown(wait=False)
            self._disk_thread.shutdown(wait=False)

        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(self.settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Warning"],
        )
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
                Route("/health", self._health),
                Route("/metrics", self._show_metrics),
            ],
            middleware=[cors],
            exception_handlers={HTTPException: _http_error, Exception: _unexpected_error},
            lifespan=lifespan,
        )

    async def _chat(self, http: HTTPRequest) -> Response:
        return await self._answer(http, chat=True)

    async def _complete(self, http: HTTPRequest) -> Response:
        return await self._answer(http, chat=False)

    async def _answer(self, http: HTTPRequest, chat: bool) -> Response:
        """Answers a request for text; its errors become answers too."""
        path = http.url.path
        try:
            response = await self._generate(http, chat)
        except RequestError as error:
            response = _error(error)
        except ClientDisconnect:
            self.metrics.cancelled += 1
            response = Response(status_code=499)
        self.metrics.request(path, response.status_code)
        return response

    async def _generate(self, http: HTTPRequest, chat: bool) -> Response:
        start = time.perf_counter()
        body = parse_json(await self._body(http))
        request = parse_request(body, chat, self.settings.defaults, self._engine.model.config.vocab_size)
        if request.model not in ("default_model", self.settings.model_name):
            raise RequestError(
                f"the model {request.model!r} is not served here, only {self.settings.model_name!r}", "model", 404
            )
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._text_thread, self._prompts, request)
        matcher = None
        if request.form is not None:
            thinks = self._thinks and any(prompt.in_thought for prompt in prompts)
            matcher = await loop.run_in_executor(self._text_thread, self._grammars.matcher, request.form, thinks)
        if self.worker.cache.disk is not None:
            await loop.run_in_executor(self._disk_thread, self._fetch, prompts)
        exchange = Exchange(loop, self.metrics, start)
        choices, sequences = self._sequences(request, prompts, exchange, matcher)
        self.worker.submit(sequences)
        exchange.sequences = sequences
        responses = Responses(chat, request.model, choices, self._fingerprint, request.alternatives is not None)
        headers = _warning(request.ignored)
        if request.stream:
            return EventStream(exchange, responses, choices, request.include_usage, headers)
        await exchange.collect(choices, http.receive)
        return Response(dumps(responses.whole()), 200, headers, "application/json")

    async def _body(self, http: HTTPRequest) -> bytes:
        chunks, size = [], 0
        async for chunk in http.stream():
            size += len(chunk)
            if size > self.settings.max_body_bytes:
                raise RequestError(
                    f"the body has more than {self.settings.max_body_bytes} bytes (--max-body-bytes)", status=413
                )
            chunks.append(chunk)
        return b"".join(chunks)

    def _prompts(self, request: Request) -> list[Prompt]:
        prompts = make_prompts(request, self._tokenizer, self.settings.template_options, self._most_characters)
        for prompt in prompts:
            try:
                self._engine.check_tokens(prompt.tokens)
            except ValueError as error:
                raise RequestError(str(error), "messages" if request.chat else "prompt") from error
        return prompts

    def _fetch(self, prompts: list[Prompt]) -> None:
        """Reads from disk what the prompts begin with. Without it they are only slower."""
        for prompt in prompts:
            try:
                self.worker.cache.fetch(prompt.tokens)
            except Exception:
                logger.exception("the prompt cache on disk was left out")

    def _sequences(
        self, request: Request, prompts: list[Prompt], exchange: Exchange, matcher: Any
    ) -> tuple[list[Choice], list[Sequence]]:
        """One sequence for each prompt and choice; the seeds of a prompt's choices follow each other."""
        seed = secrets.randbits(32) if request.seed is None else request.seed
        special = self._special_tokens() if request.sampling["xtc_probability"] > 0 else None
        choices: list[Choice] = []
        sequences: list[Sequence] = []
        for number, prompt in enumerate(prompts):
            for k in range(request.choices):
                try:
                    options = {"seed": (seed + k) % 2**32, "xtc_special_tokens": special, **request.sampling}
                    sampling = make_sampling(**options)
                    constraint = None
                    if matcher is not None:
                        among = make_sampling(**{**options, **CHANGES_OF_LOGITS})
                        constraint = Constraint(
                            matcher.deep_copy(),
                            among,
                            self._grammars.tokenize,
                            self._thinks and prompt.in_thought,
                            self._tokenizer.eos_token_ids,
                        )
                except ValueError as error:
                    raise RequestError(str(error)) from error
                splitter = None
                if request.chat and (self._thinks or request.call_tools):
                    calls = request.call_tools if request.form is None else bool(request.form.calls)
                    formed = request.form is not None
                    splitter = ChannelSplitter(self._thinks, prompt.in_thought, calls, formed)
                choice = Choice(len(choices), number)
                choices.append(choice)
                sequences.append(
                    Sequence(
                        prompt,
                        sampling,
                        request.max_tokens,
                        AnswerText(self._tokenizer, request.stops, splitter, request.tools),
                        exchange.emitter(choice),
                        eos_tokens=frozenset(self._tokenizer.eos_token_ids),
                        token_texts=self._token_texts,
                        alternatives=request.alternatives,
                        constraint=constraint,
                    )
                )
        return choices, sequences

    def _special_tokens(self) -> list[int]:
        return [*self._tokenizer.encode("\n", add_special_tokens=False), *self._tokenizer.eos_token_ids]

    async def _models(self, http: HTTPRequest) -> Response:
        entry = {"id": self.settings.model_name, "object": "model", "created": self._created, "owned_by": "lily_mlx"}
        name = http.path_params.get("name")
        if name is None:
            return Response(dumps({"object": "list", "data": [entry]}), media_type="application/json")
        if name != self.settings.model_name:
            return _error(RequestError(f"the model {name!r} is not served here", "model", 404))
        return Response(dumps(entry), media_type="application/json")

    async def _health(self, http: HTTPRequest) -> Response:
        problem = self.worker.problem
        body = {
            "status": "ok" if problem is None else "unavailable",
            "problem": problem,
            "running": self.worker.running,
            "waiting": self.worker.waiting,
        }
        return Response(dumps(body), 200 if problem is None else 503, media_type="application/json")

    async def _show_metrics(self, http: HTTPRequest) -> Response:
        return Response(self.metrics.text(self.worker), media_type="text/plain; version=0.0.4")


class Exchange:
    """The way of events from the GPU thread to one request, and of its end back.

    Args:
        loop: the event loop.
        metrics: counts cancellations and first tokens.
        start: `time.perf_counter()` at the request.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, metrics: Metrics, start: float):
        self.sequences: list[Sequence] = []
        self._loop, self._metrics, self._start = loop, metrics, start
        self._events: asyncio.Queue[tuple[Choice, Event]] = asyncio.Queue()
        self._first = True

    def emitter(self, choice: Choice) -> Callable[[Event], None]:
        """What a sequence calls with its events, on the GPU thread."""

        def emit(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens
                self._loop.call_soon_threadsafe(self._events.put_nowait, (choice, event))

        return emit

    async def next(self) -> tuple[Choice, Event]:
        """The next event."""
        item = await self._events.get()
        if self._first:
            self._first = False
            self._metrics.first_token(time.perf_counter() - self._start)
        return item

    def cancel(self) -> None:
        """Ends all sequences; harmless for those that have ended."""
        for sequence in self.sequences:
            sequence.cancel()

    async def collect(self, choices: list[Choice], receive: Receive) -> None:
        """Waits for all choices.

        Raises:
            ClientDisconnect: the client went away.
            RequestError: a sequence failed.
        """
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            while any(choice.finished is None for choice in choices):
                following = asyncio.ensure_future(self.next())
                done, _ = await asyncio.wait({gone, following}, return_when=asyncio.FIRST_COMPLETED)
                if following not in done:
                    following.cancel()
                    raise ClientDisconnect()
                choice, event = following.result()
                if isinstance(event, Exception):
                    raise event if isinstance(event, RequestError) else internal(event)
                choice.add(event)
        finally:
            gone.cancel()
            self.cancel()


class EventStream(Response):
    """An answer as server-sent events. Comments keep the connection alive while a long prompt is processed.

    Args:
        exchange: brings the events.
        responses: makes the chunks.
        choices: all of the request.
        include_usage: whether a last chunk reports the usage.
        headers: of the answer.
    """

    def __init__(
        self,
        exchange: Exchange,
        responses: Responses,
        choices: list[Choice],
        include_usage: bool,
        headers: dict[str, str],
    ):
        super().__init__(None, 200, {"Cache-Control": "no-cache", **headers}, "text/event-stream")
        del self.headers["content-length"]
        self._exchange, self._responses, self._choices = exchange, responses, choices
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream; when the client goes away, the work ends."""
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with contextlib.suppress(OSError):  # the client went away between two events
                    sending.result()
        finally:
            if not sending.done():
                self._exchange._metrics.cancelled += 1
            self._exchange.cancel()
            sending.cancel()
            gone.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for block in self._blocks():
            await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _blocks(self) -> AsyncIterator[bytes]:
        while any(choice.finished is None for choice in self._choices):
            try:
                choice, event = await asyncio.wait_for(self._exchange.next(), KEEP_ALIVE_SECONDS)
            except TimeoutError:
                yield b": keep-alive\n\n"
                continue
            if isinstance(event, Exception):
                error = event if isinstance(event, RequestError) else internal(event)
                yield b"data: " + dumps(error.body()) + b"\n\n"
                break
            for chunk in self._responses.chunks(choice, event):
                yield b"data: " + dumps(chunk) + b"\n\n"
            if isinstance(event, Finished):
                choice.finished = event
        else:
            if self._include_usage:
                yield b"data: " + dumps(self._responses.usage_chunk()) + b"\n\n"
        yield b"data: [DONE]\n\n"


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone away; the body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(error: RequestError) -> Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return Response(dumps(error.body()), error.status, headers, "application/json")


async def _http_error(http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(RequestError(f"{http.method} {http.url.path}: {error.detail}", status=error.status_code))


async def _unexpected_error(http: HTTPRequest, error: Exception) -> Response:
    return _error(internal(error))


def _warning(ignored: tuple[str, ...]) -> dict[str, str]:
    """A header that names the fields without effect."""
    if not ignored:
        return {}
    names = json.dumps(", ".join(ignored))[1:-1][:_LONGEST_WARNING].replace("\\", "").replace('"', "'")
    return {"Warning": f'299 lily_mlx "fields without effect: {names}"'}


def _fingerprint() -> str:
    import mlx.core as mx

    import lily_mlx
    from lily_mlx.metal import current_backend

    return f"lily_mlx-{lily_mlx.__version__}-mlx-{mx.__version__}-{current_backend()}"
