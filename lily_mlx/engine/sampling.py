"""How tokens are chosen: on the device by the head's kernels, or by a caller's functions on the logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mlx.core as mx

from lily_mlx.model import Sampling

# Below this the most likely token's probability rounds to 1, and logits / temperature could overflow.
MIN_TEMPERATURE = 1e-6

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


def make_sampling(temp: float = 0.0, seed: int | None = None) -> Sampling:
    """Sampling inside the step.

    Args:
        temp: 0 chooses the most likely token; otherwise tokens are drawn from softmax(logits / temp).
        seed: of the generator, its low 32 bits count; None draws one from `mx.random`, so that
            `mx.random.seed` repeats a run.

    Raises:
        ValueError: `temp` is negative or not a finite number, or `seed` is negative.
    """
    if not math.isfinite(temp) or temp < 0:
        raise ValueError(f"temperature {temp} is not supported: give a finite number, 0 or above")
    if seed is not None and seed < 0:
        raise ValueError(f"seed {seed} is not supported: give an integer, 0 or above")
    temp = 0.0 if temp < MIN_TEMPERATURE else temp
    if seed is None:
        seed = int(mx.random.randint(0, 2**31 - 1).item()) if temp else 0
    parameters = mx.array([temp, 0, 0, 0, 0, 0, 0, 0], mx.float32)
    return Sampling(parameters, mx.array([seed % 2**32], mx.uint32))


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
