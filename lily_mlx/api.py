"""The Python interface: `load`, `generate` and `stream_generate` with mlx_lm's signatures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from lily_mlx.engine import DEFAULT_CHUNK_SIZE, Engine, generate_tokens, log_probabilities, make_sampling
from lily_mlx.engine.sampling import LogitsProcessor, Sampler
from lily_mlx.model import Model, read_config
from lily_mlx.model.config import require_supported_family

# mlx_lm takes seconds to import, so it is imported where it is used.
if TYPE_CHECKING:
    from mlx_lm.generate import GenerationResponse
    from mlx_lm.tokenizer_utils import TokenizerWrapper

DEFAULT_MAX_TOKENS = 256

# Keywords of mlx_lm's generate_step that this version does not act on, with the value that asks for nothing.
_NOT_SUPPORTED: dict[str, Any] = {
    "draft_model": None,
    "stream": None,
    "max_kv_size": None,
    "prompt_cache": None,
    "kv_bits": None,
    "input_embeddings": None,
}
# Keywords that mean nothing without one of those above or a draft model.
_WITHOUT_EFFECT = ("kv_group_size", "quantized_kv_start", "num_draft_tokens")


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Loads a model and its tokenizer.

    Args:
        path_or_hf_repo: a directory in MLX format, or a Hugging Face repository, which mlx_lm downloads.
        tokenizer_config: keywords for the tokenizer.
        model_config, adapter_path, lazy: not supported; they must keep their defaults.
        return_config: return the contents of `config.json` as well.
        revision: branch, tag or commit of the repository.
        trust_remote_code: accepted; no model of this family has code of its own.

    Returns:
        (model, tokenizer) or (model, tokenizer, config). The tokenizer is mlx_lm's `TokenizerWrapper`.

    Raises:
        FileNotFoundError: the directory or a file in it is missing.
        ValueError: the model is of another family, corrupt or not supported, or an argument is not supported.
    """
    del trust_remote_code
    for name, value in (("model_config", model_config), ("adapter_path", adapter_path), ("lazy", lazy)):
        if value:
            raise ValueError(f"load({name}={value!r}) is not supported by lily_mlx yet; use mlx_lm.load")
    directory = find_model(path_or_hf_repo, revision)
    config = read_config(directory)
    require_supported_family(config)

    from mlx_lm.utils import load_tokenizer

    model = Model.load(directory)
    tokenizer = load_tokenizer(directory, tokenizer_config, eos_token_ids=config.get("eos_token_id"))
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def find_model(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """The local directory of a model; a Hugging Face repository is downloaded if need be.

    Raises:
        FileNotFoundError: there is no such directory, and it is no name of a repository.
    """
    path = Path(path_or_hf_repo).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_hf_repo)
    if path.exists():
        raise FileNotFoundError(f"{name!r} is a file: give the model's directory")
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or "\\" in name or " " in name:
        raise FileNotFoundError(f"{name!r} does not exist, and it is not a Hugging Face name like 'owner/model'")

    from mlx_lm.utils import _download

    try:
        return Path(_download(name, revision=revision))
    except Exception as error:
        raise FileNotFoundError(f"{name!r} is no local directory, and its download failed: {error}") from error


def stream_generate(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    draft_model: None = None,
    *,
    temp: float = 0.0,
    seed: int | None = None,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prefill_step_size: int = DEFAULT_CHUNK_SIZE,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Iterator[GenerationResponse]:
    """Generates text piece by piece.

    Args:
        model, tokenizer: from `load`.
        prompt: text, which is encoded as it is, or token ids.
        max_tokens: tokens to generate; -1 for as many as the context holds.
        draft_model: not supported; must be None.
        temp: 0 for the most likely token, else the temperature of sampling inside the step's kernels.
        seed: of that sampling; None draws one from `mx.random`.
        sampler: a function from log-probabilities [1, V] to tokens [1], as mlx_lm's `make_sampler` gives. It
            replaces `temp` and `seed` and runs beside the kernels, at its own cost.
        logits_processors: functions from (tokens so far, logits [1, V]) to logits.
        prefill_step_size: tokens of the prompt that go through the layers at once.
        prompt_progress_callback: called with (tokens processed, tokens of the prompt).
        options: other keywords of mlx_lm; they must keep their defaults.

    Yields:
        mlx_lm's `GenerationResponse`. The last one has a `finish_reason`: "stop" after an end-of-sequence
        token, "length" otherwise. `logprobs`, float32 [V], is computed only if read.

    Raises:
        TypeError: an unknown keyword.
        ValueError: an empty or too long prompt, or a value that is not supported.
    """
    from mlx_lm.generate import GenerationResponse, wired_limit
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    _refuse(draft_model=draft_model, **options)
    if max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"max_tokens is {max_tokens}: give a positive number, or -1 for no limit")
    if (sampler is not None or logits_processors) and (temp != 0 or seed is not None):
        raise ValueError(
            "temp and seed belong to the sampling inside the kernels; with a sampler or logits_processors "
            "give them to mlx_lm's make_sampler and to mx.random.seed"
        )
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    tokens = encode(tokenizer, prompt)
    engine = Engine(model)
    engine.check_tokens(tokens)
    limit = engine.token_limit(len(tokens), max_tokens)
    steps = generate_tokens(
        engine,
        tokens,
        make_sampling(temp, seed),
        max_tokens=limit,
        sampler=sampler,
        logits_processors=logits_processors,
        chunk_size=prefill_step_size,
        progress=prompt_progress_callback,
    )
    with wired_limit(model.arrays):
        detokenizer = tokenizer.detokenizer
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


def generate(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int] | mx.array,
    verbose: bool = False,
    **options: Any,
) -> str | None:
    """Generates a whole text.

    Args:
        model, tokenizer, prompt: see `stream_generate`.
        verbose: print the text as it comes, then the speeds, in mlx_lm's format.
        options: keywords of `stream_generate`.

    Returns:
        The text. None if `verbose` and the text is empty, as in mlx_lm.
    """
    if verbose:
        print("=" * 10)
    pieces = []
    for response in stream_generate(model, tokenizer, prompt, **options):
        pieces.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    text = "".join(pieces)
    if not verbose:
        return text
    print()
    print("=" * 10)
    if not text:
        print("No text generated for this prompt")
        return None
    print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
    print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
    print(f"Peak memory: {response.peak_memory:.3f} GB")
    return text


def encode(tokenizer: TokenizerWrapper, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """Token ids of a prompt. A text that starts with the beginning-of-sequence token gets no second one.

    Raises:
        ValueError: the prompt is text that is not valid Unicode, or an array that is not one row of integers.
    """
    if isinstance(prompt, str):
        require_unicode(prompt)
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    if isinstance(prompt, mx.array):
        if prompt.ndim != 1 or (prompt.size and not mx.issubdtype(prompt.dtype, mx.integer)):
            raise ValueError(f"the prompt is {prompt.dtype} {list(prompt.shape)}: give one row of integer token ids")
        prompt = prompt.tolist()
    return list(prompt)


def require_unicode(text: str) -> None:
    """Raises ValueError for text with bytes that were not UTF-8, which Python keeps as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt is not valid UTF-8 at character {error.start}: convert it, for example with iconv"
        ) from error


def _refuse(**options: Any) -> None:
    """Raises for keywords that would change the result and that this version does not act on."""
    for name, value in options.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _NOT_SUPPORTED:
            raise TypeError(f"stream_generate() got an unexpected keyword argument {name!r}")
        if value is not _NOT_SUPPORTED[name]:
            raise ValueError(f"{name} is not supported by lily_mlx yet; leave it out, or use mlx_lm.generate")
