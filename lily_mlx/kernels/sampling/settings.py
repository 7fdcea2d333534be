"""What a caller can ask of the choice of a token, checked, and its form on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import mlx.core as mx
import numpy as np

# Below this the most likely token's probability rounds to 1, and logits / temperature could overflow.
MIN_TEMPERATURE = 1e-6
# Larger vocabularies would not be exact in the settings' float32.
MOST_TOKENS = 2**24
MOST_CONTEXT = 2**16
SIZE = 16
# The place of what batches add, see settings.h.
UNFILTERED = 13


@dataclass(frozen=True)
class Settings:
    """Filters and penalties with the names, meanings and neutral values of mlx_lm's `make_sampler` and
    `make_logits_processors`.

    Attributes:
        temperature: 0 takes the most likely token, whatever the filters; below 1e-6 means 0.
        top_p: keep the most likely tokens until their probability is this in all; 0 and 1: all.
        min_p: drop tokens less likely than this part of the most likely one; 0: none.
        min_tokens_to_keep: tokens that min-p keeps at least.
        top_k: keep this many tokens; 0: all.
        xtc_probability: how often the most likely tokens are dropped; 0: never.
        xtc_threshold: the probability above which a token may be dropped then, 0 to 0.5.
        repetition_penalty: divides positive and multiplies negative logits of recent tokens; 0 and 1: none.
        presence_penalty: subtracted from the logits of recent tokens; 0: none.
        frequency_penalty: subtracted for each time that a token occurs in the recent ones; 0: none.
        repetition_context_size, presence_context_size, frequency_context_size: how many tokens are recent.

    Raises:
        ValueError: a value is out of its range or not a number.
    """

    temperature: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_context_size: int = 20
    presence_context_size: int = 20
    frequency_context_size: int = 20

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_number(field.name, getattr(self, field.name), whole=field.type == "int")
        _check(self.temperature >= 0, "temperature", self.temperature, "a finite number, 0 or above")
        for name in ("top_p", "min_p", "xtc_probability"):
            _check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a number from 0 to 1")
        _check(0 <= self.xtc_threshold <= 0.5, "xtc_threshold", self.xtc_threshold, "a number from 0 to 0.5")
        least = self.min_tokens_to_keep
        _check(1 <= least <= MOST_TOKENS, "min_tokens_to_keep", least, "a whole number from 1")
        _check(self.top_k >= 0, "top_k", self.top_k, "a whole number, 0 to keep all tokens")
        _check(self.repetition_penalty >= 0, "repetition_penalty", self.repetition_penalty, "a number from 0")
        for name in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
            value = getattr(self, name)
            _check(1 <= value <= MOST_CONTEXT, name, value, f"a whole number from 1 to {MOST_CONTEXT}")

    @property
    def draws(self) -> bool:
        """Whether the token is drawn, not simply the most likely one."""
        return self.temperature >= MIN_TEMPERATURE

    @property
    def filters(self) -> bool:
        """Whether tokens are left out of the draw."""
        return self.draws and (0 < self.top_p < 1 or self.min_p > 0 or self.top_k > 0 or self.xtc_probability > 0)

    @property
    def contexts(self) -> tuple[int, int, int]:
        """Recent tokens that the repetition, presence and frequency penalties look at; 0 where there is none."""
        return (
            self.repetition_context_size if self.repetition_penalty not in (0, 1) else 0,
            self.presence_context_size if self.presence_penalty != 0 else 0,
            self.frequency_context_size if self.frequency_penalty != 0 else 0,
        )

    @property
    def recent_size(self) -> int:
        """Slots for recent tokens: a power of two that holds the longest context, at least 32; 0 without penalties."""
        longest = max(self.contexts)
        return max(32, 1 << (longest - 1).bit_length()) if longest else 0

    def values(self) -> np.ndarray:
        """Float32 [16], in the order of settings.h."""
        top_k = min(self.top_k, MOST_TOKENS) if self.top_k else MOST_TOKENS
        packed = [
            self.temperature if self.draws else 0.0,
            self.top_p if 0 < self.top_p < 1 else 2.0,
            math.log(self.min_p) if self.min_p else -math.inf,
            self.min_tokens_to_keep,
            top_k,
            self.xtc_probability,
            self.xtc_threshold,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            *self.contexts,
        ]
        return np.array(packed + [0.0] * (SIZE - len(packed)), np.float32)

    def array(self) -> mx.array:
        """`values` for the kernels."""
        return mx.array(self.values())


def _check_number(name: str, value: object, whole: bool) -> None:
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value):
        wanted = "a whole number" if whole else "a finite number"
        raise ValueError(f"{name} {value!r} is not supported: give {wanted}")


def _check(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise ValueError(f"{name} {value} is not supported: give {wanted}")
