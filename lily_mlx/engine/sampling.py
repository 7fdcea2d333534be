"""How tokens are chosen: on the device by the step's kernels, or by a caller's functions on the logits."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import mlx.core as mx
import numpy as np

from lily_mlx.kernels.sampling import NO_TOKEN, Settings
from lily_mlx.model import Controls, Sampling

# Lists of tokens are filled up to a multiple of this, so that few lengths occur.
_LIST_STEP = 32

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


def make_sampling(
    temp: float = 0.0,
    seed: int | None = None,
    *,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Iterable[int] | None = None,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    presence_context_size: int = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int = 20,
) -> Sampling:
    """Sampling inside the step, with the parameters of mlx_lm's `make_sampler` and `make_logits_processors`.

    Biases and penalties change the logits first, in the order of the arguments. The filters look at the
    probabilities before the temperature, in the order top-p, min-p, XTC, top-k; without a temperature they are not
    asked.

    Args:
        temp: 0 chooses the most likely token; otherwise tokens are drawn from softmax(logits / temp).
        seed: of the generator, its low 32 bits count; None draws one from `mx.random`, so that
            `mx.random.seed` repeats a run.
        top_p: keep the most likely tokens until their probability reaches this in all; 0 or 1 keep all tokens.
        min_p: drop tokens less likely than this part of the most likely one; 0 drops none.
        min_tokens_to_keep: tokens that `min_p` keeps at least.
        top_k: keep this many tokens; 0 keeps all.
        xtc_probability: how often XTC drops tokens; 0 for never.
        xtc_threshold: the probability, 0 to 0.5, above which XTC drops all tokens but the least likely of them.
        xtc_special_tokens: token ids that XTC never drops.
        logit_bias: additions to logits by token id; -infinity forbids a token.
        repetition_penalty: divides the positive logits of recent tokens and multiplies negative ones; None, 0 or 1
            for none.
        presence_penalty: subtracted from the logits of recent tokens; None or 0 for none.
        frequency_penalty: subtracted for each time that a token is among the recent ones; None or 0 for none.
        repetition_context_size, presence_context_size, frequency_context_size: the number of recent tokens, up to
            65,536; tokens of the prompt count.

    Raises:
        ValueError: a value is out of its range.
    """
    if isinstance(temp, (int, float)) and not (math.isfinite(temp) and temp >= 0):
        raise ValueError(f"temperature {temp} is not supported: give a finite number, 0 or above")
    if seed is not None and seed < 0:
        raise ValueError(f"seed {seed} is not supported: give an integer, 0 or above")
    settings = Settings(
        temperature=temp,
        top_p=top_p,
        min_p=min_p,
        min_tokens_to_keep=min_tokens_to_keep,
        top_k=top_k,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        repetition_penalty=0 if repetition_penalty is None else repetition_penalty,
        presence_penalty=0 if presence_penalty is None else presence_penalty,
        frequency_penalty=0 if frequency_penalty is None else frequency_penalty,
        repetition_context_size=repetition_context_size,
        presence_context_size=presence_context_size,
        frequency_context_size=frequency_context_size,
    )
    controls = _controls(settings, dict(logit_bias or {}), list(xtc_special_tokens or ()))
    if seed is None:
        seed = int(mx.random.randint(0, 2**31 - 1).item()) if settings.draws else 0
    temperature = temp if settings.draws and controls is None else 0
    parameters = mx.array([temperature, 0, 0, 0, 0, 0, 0, 0], mx.float32)
    return Sampling(parameters, mx.array([seed % 2**32], mx.uint32), controls)


# The keywords of `make_sampling`.
SAMPLING_OPTIONS = tuple(inspect.signature(make_sampling).parameters)


def _controls(settings: Settings, bias: dict[int, float], special: list[int]) -> Controls | None:
    for token, value in bias.items():
        _check_token("logit_bias", token)
        if math.isnan(value) or value == math.inf:
            raise ValueError(f"logit_bias of token id {token} is {value}: give a finite number, or -inf to forbid it")
    for token in special:
        _check_token("xtc_special_tokens", token)
    if not (settings.filters or settings.recent_size or bias):
        return None
    ids = _filled(list(bias))
    values = np.zeros(ids.size, np.float32)
    values[: len(bias)] = list(bias.values())
    return Controls(
        settings=settings.array(),
        bias_ids=mx.array(ids),
        bias_values=mx.array(values),
        special_tokens=mx.array(_filled(special)),
        empty=mx.array(np.full(max(_LIST_STEP, settings.recent_size), NO_TOKEN, np.uint32)),
        filtered=settings.filters,
        remembers=settings.recent_size > 0,
        largest_token=max([*bias, *special], default=-1),
    )


def _check_token(name: str, token: int) -> None:
    if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < NO_TOKEN:
        raise ValueError(f"{name} names token id {token!r}: give whole numbers, 0 or above")


def _filled(tokens: Sequence[int]) -> np.ndarray:
    """Token ids, and `NO_TOKEN` up to a multiple of `_LIST_STEP`."""
    ids = np.full(max(1, -(-len(tokens) // _LIST_STEP)) * _LIST_STEP, NO_TOKEN, np.uint32)
    ids[: len(tokens)] = tokens
    return ids


def recent_tokens(tokens: Sequence[int], sampling: Sampling) -> mx.array | None:
    """The memory of a sequence that consists of these tokens, for the `recent` of its state.

    Penalties look back on tokens that were fed under them. A caller who knows the tokens of a state that was made
    without, such as one from a cache of prompts, gives it this memory.

    Args:
        tokens: all tokens that the state holds, from its first on.
        sampling: what the state goes on with.

    Returns:
        uint32 [R], or None if the sampling has no penalties.
    """
    empty = sampling.recent_or_empty(None)
    if empty is None:
        return None
    slots = np.full(empty.size, NO_TOKEN, np.uint32)
    for position in range(max(0, len(tokens) - slots.size), len(tokens)):
        slots[position % slots.size] = tokens[position]
    return mx.array(slots)


def resized_memory(recent: mx.array, length: int, size: int) -> mx.array:
    """A memory of recent tokens with another number of slots.

    Args:
        recent: uint32 [R], see `recent_tokens`.
        length: tokens of the sequence.
        size: slots that are wanted, a power of two.

    Returns:
        uint32 [size]. What does not fit is forgotten, the oldest first.
    """
    if recent.size == size:
        return recent
    slots = np.arange(size)
    position = length - 1 - ((length - 1 - slots) & (size - 1))  # the last one that has this slot
    is_known = (position >= 0) & (position > length - 1 - recent.size)
    kept = recent[mx.array(position % recent.size)]
    return mx.where(mx.array(is_known), kept, mx.array(NO_TOKEN, mx.uint32))


def log_probabilities(logits: mx.array) -> mx.array:
    """Logarithms of the softmax over the last axis, in float32; computed only if read."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class HostChooser:
    """Chooses tokens with mlx_lm's samplers and logits processors, outside the step's kernels.

    Args:
        sampler: takes log-probabilities [1, V], returns a token [1]; None chooses the most likely one.
        processors: each takes all tokens so far [n] and logits [1, V], and returns logits.
        tokens: uint32 [n], the prompt.
    """

    def __init__(self, sampler: Sampler | None, processors: Sequence[LogitsProcessor], tokens: mx.array):
        self._sampler = sampler or (lambda logprobs: mx.argmax(logprobs, axis=-1))
        self._processors = processors
        self._tokens = tokens

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the token, uint32 [1], and the logits after the processors, [1, V]."""
        for processor in self._processors:
            logits = processor(self._tokens, logits)
        token = self._sampler(log_probabilities(logits)).reshape(1).astype(mx.uint32)
        if self._processors:
            self._tokens = mx.concatenate([self._tokens, token])
        return token, logits
