"""The Python interface: `generate`, `stream_generate`, `batch_generate` and `generate_step` with mlx_lm's signatures."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx

from lily_mlx.engine import (
    DEFAULT_CHUNK_SIZE,
    SAMPLING_OPTIONS,
    Engine,
    SequenceState,
    generate_tokens,
    log_probabilities,
    make_sampling,
)
from lily_mlx.engine.sampling import LogitsProcessor, Sampler
from lily_mlx.model import Model, Sampling

from .detokenizer import make_detokenizer
from .loading import find_model, load

# mlx_lm takes seconds to import, so it is imported where it is used.
if TYPE_CHECKING:
    from mlx_lm.generate import BatchResponse, GenerationResponse
    from mlx_lm.tokenizer_utils import TokenizerWrapper

DEFAULT_MAX_TOKENS = 256

# Keywords of mlx_lm's generate_step that the kernels cannot act on, and why.
REFUSED: dict[str, str] = {
    "draft_model": "speculative decoding rewinds the cache, and a Gated DeltaNet state cannot go back (mlx_lm refuses "
    "this family too); leave it out",
    "max_kv_size": "attention layers of this family keep every token (mlx_lm ignores the value); leave it out",
    "kv_bits": "the attention kernels read bfloat16 keys and values; leave it out, or load the model with mlx_lm.load",
    "input_embeddings": "the kernels take token ids; load the model with mlx_lm.load",
}
# Keywords that mean nothing without one of those above.
_WITHOUT_EFFECT = ("kv_group_size", "quantized_kv_start", "num_draft_tokens")

Item = TypeVar("Item")

__all__ = ["batch_generate", "find_model", "generate", "generate_step", "load", "stream_generate"]


def stream_generate(
    model: Any,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    draft_model: Any = None,
    stream: Any = None,
    *,
    temp: float = 0.0,
    seed: int | None = None,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prefill_step_size: int = DEFAULT_CHUNK_SIZE,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    prompt_cache: list[Any] | None = None,
    **options: Any,
) -> Iterator[GenerationResponse]:
    """Generates text piece by piece.

    Args:
        model, tokenizer: from `load`, or from `mlx_lm.load` and `accelerate`. A model of another family goes to
            mlx_lm's function.
        prompt: text, which is encoded as it is, or token ids.
        max_tokens: tokens to generate; -1 for as many as the context holds.
        draft_model: not supported for this family; must be None.
        stream: the MLX stream that the work goes to; None for the default one.
        temp: 0 for the most likely token, else the temperature of sampling inside the step's kernels.
        seed: of that sampling; None draws one from `mx.random`.
        sampler: a function from log-probabilities [1, V] to tokens [1], as mlx_lm's `make_sampler` gives. It
            replaces `temp`, `seed` and the other keywords of sampling and runs beside the kernels, at its own cost.
        logits_processors: functions from (tokens so far, logits [1, V]) to logits.
        prefill_step_size: tokens of the prompt that go through the layers at once.
        prompt_progress_callback: called with (tokens processed, tokens of the prompt).
        prompt_cache: from mlx_lm's `make_prompt_cache` or `load_prompt_cache`; the prompt continues its tokens. It is
            changed in place and holds the prompt and every token that came out, however the generation ends.
        options: more of the sampling inside the kernels, with mlx_lm's names: `top_p`, `min_p`,
            `min_tokens_to_keep`, `top_k`, `xtc_probability`, `xtc_threshold`, `xtc_special_tokens`, `logit_bias`,
            and `repetition_penalty`, `presence_penalty`, `frequency_penalty` with their `..._context_size`, see
            `lily_mlx.engine.make_sampling`; and other keywords of mlx_lm, which must keep their defaults.

    Yields:
        mlx_lm's `GenerationResponse`. The last one has a `finish_reason`: "stop" after an end-of-sequence
        token, "length" otherwise. `logprobs`, float32 [V], is computed only if read.

    Raises:
        TypeError: an unknown keyword.
        ValueError: an empty or too long prompt, or a value that is not supported.
    """
    from mlx_lm.generate import GenerationResponse, wired_limit
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    if max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"max_tokens is {max_tokens}: give a positive number, or -1 for no limit")
    more = {name: options.pop(name) for name in SAMPLING_OPTIONS if name in options}
    if (sampler is not None or logits_processors) and (temp != 0 or seed is not None or more):
        raise ValueError(
            f"{', '.join(['temp', 'seed', *more])} belong to the sampling inside the kernels; with a sampler or "
            "logits_processors give them to mlx_lm's make_sampler and make_logits_processors, and the seed to "
            "mx.random.seed"
        )
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    tokens = encode(tokenizer, prompt)
    ours = _model_of(model)
    if ours is None:
        yield from _mlx_lm_stream_generate(
            model,
            tokenizer,
            mx.array(tokens, mx.uint32),
            {"temp": temp, **more},
            seed,
            sampler,
            max_tokens=max_tokens,
            draft_model=draft_model,
            logits_processors=logits_processors,
            prefill_step_size=prefill_step_size,
            prompt_progress_callback=prompt_progress_callback,
            prompt_cache=prompt_cache,
            **({} if stream is None else {"stream": stream}),
            **options,
        )
        return
    _refuse("stream_generate", draft_model=draft_model, **options)
    before = _start(ours, tokens, prompt_cache)
    limit = Engine(ours).token_limit(before.length + len(tokens), max_tokens)
    steps = _steps(
        ours,
        tokens,
        make_sampling(temp, seed, **more),
        stream,
        before,
        prompt_cache,
        max_tokens=limit,
        sampler=sampler,
        logits_processors=logits_processors,
        chunk_size=prefill_step_size,
        progress=prompt_progress_callback,
    )
    with wired_limit(ours.arrays), contextlib.closing(steps):
        detokenizer = make_detokenizer(tokenizer)
        start = time.perf_counter()
        prompt_tps = 0.0
        for count, (token, logits) in enumerate(steps, start=1):
            if count == 1:
                prompt_tps = len(tokens) / (time.perf_counter() - start)
                start = time.perf_counter()
            finish_reason = None
            if token in tokenizer.eos_token_ids:
                finish_reason = "stop"
            else:
                detokenizer.add_token(token)
                if count == limit:
                    finish_reason = "length"
            if finish_reason:
                detokenizer.finalize()
            yield GenerationResponse(
                text=detokenizer.last_segment,
                token=token,
                logprobs=log_probabilities(logits)[0],
                from_draft=False,
                prompt_tokens=len(tokens),
                prompt_tps=prompt_tps,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - start),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=finish_reason,
            )
            if finish_reason:
                return


def generate_step(
    prompt: mx.array,
    model: Any,
    stream: Any = None,
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = DEFAULT_CHUNK_SIZE,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Iterator[tuple[int, mx.array]]:
    """Generates tokens, without a tokenizer.

    Args:
        prompt: token ids [n].
        max_tokens: tokens to generate; -1 for as many as the context holds, 0 to process the prompt only.
        model, stream, sampler, logits_processors, prompt_cache, prefill_step_size, prompt_progress_callback, options:
            see `stream_generate`.

    Yields:
        A token and the log-probabilities [V] that it was chosen from, which are computed only if read.
    """
    ours = _model_of(model)
    if ours is None:
        from mlx_lm.generate import generate_step as mlx_lm_generate_step

        yield from mlx_lm_generate_step(
            prompt,
            model,
            max_tokens=max_tokens,
            sampler=sampler,
            logits_processors=logits_processors,
            prompt_cache=prompt_cache,
            prefill_step_size=prefill_step_size,
            prompt_progress_callback=prompt_progress_callback,
            **({} if stream is None else {"stream": stream}),
            **options,
        )
        return
    _refuse("generate_step", **options)
    tokens = token_ids(prompt)
    steps = _steps(
        ours,
        tokens,
        make_sampling(),
        stream,
        _start(ours, tokens, prompt_cache),
        prompt_cache,
        max_tokens=max_tokens,
        sampler=sampler,
        logits_processors=logits_processors,
        chunk_size=prefill_step_size,
        progress=prompt_progress_callback,
    )
    with contextlib.closing(steps):
        for token, logits in steps:
            yield token, log_probabilities(logits)[0]


def batch_generate(
    model: Any,
    tokenizer: TokenizerWrapper,
    prompts: Sequence[Sequence[int]],
    prompt_caches: Sequence[list[Any]] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    **options: Any,
) -> BatchResponse:
    """Generates a text for each prompt, with mlx_lm's `batch_generate` over the kernels.

    The sequences of a batch take turns: each one costs what it costs alone, and gives what it gives alone.

    Args:
        model, tokenizer: see `stream_generate`.
        prompts: token ids of each prompt.
        prompt_caches: a prompt cache for each prompt; they stay as they are.
        max_tokens: for all prompts, or one number for each.
        verbose, return_prompt_caches, return_token_ids, return_logprobs: see `mlx_lm.batch_generate`.
        options: of mlx_lm's `BatchGenerator`, such as `sampler` and `prefill_step_size`.

    Raises:
        ValueError: an empty prompt, or a list of another length than `prompts`.
    """
    from mlx_lm import batch_generate as mlx_lm_batch_generate

    from .accelerate.model import callable_model

    if _model_of(model) is not None and options.get("max_kv_size") is not None:
        raise ValueError(f"max_kv_size is not supported: {REFUSED['max_kv_size']}")
    return mlx_lm_batch_generate(
        callable_model(model),
        tokenizer,
        [list(prompt) for prompt in prompts],
        prompt_caches,
        max_tokens if isinstance(max_tokens, int) else list(max_tokens),
        verbose,
        return_prompt_caches,
        return_token_ids,
        return_logprobs,
        **options,
    )


def generate(
    model: Any,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int] | mx.array,
    verbose: bool = False,
    **options: Any,
) -> str | None:
    """Generates a whole text.

    Args:
        model, tokenizer, prompt: see `stream_generate`.
        verbose: print the text as it comes, then the speeds, in mlx_lm's format; after Ctrl-C those so far.
        options: keywords of `stream_generate`.

    Returns:
        The text. None if `verbose` and the text is empty, as in mlx_lm.
    """
    if verbose:
        print("=" * 10)
    pieces, response, interrupt = [], None, None
    try:
        for response in stream_generate(model, tokenizer, prompt, **options):
            pieces.append(response.text)
            if verbose:
                print(response.text, end="", flush=True)
    except KeyboardInterrupt as error:
        interrupt = error
    text = "".join(pieces)
    if verbose:
        print()
        print("=" * 10)
        if text and response is not None:
            print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
            print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
            print(f"Peak memory: {response.peak_memory:.3f} GB")
        else:
            print("No text generated for this prompt")
    if interrupt is not None:
        raise interrupt
    return None if verbose and not text else text


def encode(tokenizer: TokenizerWrapper, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """Token ids of a prompt. A text that starts with the beginning-of-sequence token gets no second one.

    Raises:
        ValueError: the prompt is text that is not valid Unicode, or an array that is not one row of integers.
    """
    if isinstance(prompt, str):
        require_unicode(prompt)
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    return token_ids(prompt)


def token_ids(prompt: Sequence[int] | mx.array) -> list[int]:
    """A prompt's token ids as a list.

    Raises:
        ValueError: an array that is not one row of integers.
    """
    if isinstance(prompt, mx.array):
        if prompt.ndim != 1 or (prompt.size and not mx.issubdtype(prompt.dtype, mx.integer)):
            raise ValueError(f"the prompt is {prompt.dtype} {list(prompt.shape)}: give one row of integer token ids")
        return [int(token) for token in prompt.tolist()]
    return list(prompt)


def require_unicode(text: str) -> None:
    """Raises ValueError for text with bytes that were not UTF-8, which Python keeps as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text {text[:40]!a} is not valid UTF-8 at character {error.start}: convert it, for example with iconv"
        ) from error


def _refuse(function: str, **options: Any) -> None:
    """Raises for keywords that would change the result and that the kernels cannot act on."""
    for name, value in options.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in REFUSED:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ValueError(f"{name} is not supported by lily_mlx: {REFUSED[name]}")


def _model_of(model: Any) -> Model | None:
    """The model of this package behind a model object; None for a model that runs on mlx_lm's own path."""
    if isinstance(model, Model):
        return model
    found = getattr(model, "lily_model", None)
    return found if isinstance(found, Model) else None


def _start(model: Model, tokens: Sequence[int], prompt_cache: list[Any] | None) -> SequenceState:
    """The sequence that a prompt continues, after a check that it can."""
    engine = Engine(model)
    start = engine.empty()
    if prompt_cache is not None:
        from .accelerate.forward import sequence_state

        start = sequence_state(model.config, prompt_cache)
    engine.check_tokens(tokens, start.length)
    return start


def _steps(
    model: Model,
    tokens: Sequence[int],
    sampling: Sampling,
    stream: Any,
    start: SequenceState,
    prompt_cache: list[Any] | None,
    **options: Any,
) -> Generator[tuple[int, mx.array], None, None]:
    """`generate_tokens` on a stream, with the final state in mlx_lm's kind of prompt cache."""
    if prompt_cache is not None:
        from .accelerate.forward import store_sequence

        options["keep"] = lambda state: store_sequence(prompt_cache, state)
    return _on_stream(generate_tokens(Engine(model), tokens, sampling, start=start, **options), stream)


def _on_stream(items: Iterator[Item], stream: Any) -> Generator[Item, None, None]:
    """The same items, each made on a stream that is not left to the consumer."""

    def here() -> Any:
        return contextlib.nullcontext() if stream is None else mx.stream(stream)

    try:
        while True:
            with here():
                item = next(items, None)
            if item is None:
                return
            yield item
    finally:
        with here():
            items.close()  # type: ignore[attr-defined]


def _mlx_lm_stream_generate(
    model: Any,
    tokenizer: TokenizerWrapper,
    prompt: mx.array,
    sampling: dict[str, Any],
    seed: int | None,
    sampler: Sampler | None,
    **options: Any,
) -> Iterator[GenerationResponse]:
    """mlx_lm's own function, for a model that the kernels do not run."""
    from mlx_lm import stream_generate as mlx_lm_stream_generate
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    make_sampling(seed=seed, **sampling)  # the same values are refused
    if seed is not None:
        mx.random.seed(seed)
    of_logits = inspect.signature(make_logits_processors).parameters
    changes = {name: sampling.pop(name) for name in of_logits if name in sampling}
    sampler = sampler or make_sampler(**sampling)
    options["logits_processors"] = options["logits_processors"] or make_logits_processors(**changes)
    yield from mlx_lm_stream_generate(model, tokenizer, prompt, sampler=sampler, **options)
