"""The end of a step or a chunk: the next token, chosen on the device."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from lily_mlx.kernels.sampling import adjust, draw, head, select

from .config import ModelConfig
from .weights import ModelWeights


@dataclass(frozen=True)
class Controls:
    """What a choice does beside the temperature: it costs a launch more.

    Attributes:
        settings: float32 [16], see `lily_mlx.kernels.sampling.Settings`; the temperature is among them.
        bias_ids, bias_values: uint32 [B] and float32 [B], additions to the logits of single tokens.
        special_tokens: uint32 [S], tokens that XTC never drops.
        empty: uint32 [R], the memory of recent tokens without any.
        filtered: whether tokens are left out of the draw.
        remembers: whether the choice depends on recent tokens.
        largest_token: the largest id in the lists, -1 without any.
    """

    settings: mx.array
    bias_ids: mx.array
    bias_values: mx.array
    special_tokens: mx.array
    empty: mx.array
    filtered: bool
    remembers: bool
    largest_token: int


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, on the device.

    Attributes:
        parameters: float32 [8], the temperature (0: the most likely token), then zeros; with `controls` all zeros.
        seed: uint32 [1], of the generator that draws the token where the temperature is above 0.
        controls: filters, penalties and biases, if there are any.
    """

    parameters: mx.array
    seed: mx.array
    controls: Controls | None = None

    @property
    def form(self) -> str:
        """Names the launches that it leads to."""
        if self.controls is None:
            return "plain"
        return f"filtered={self.controls.filtered} remembers={self.controls.remembers}"

    def check_vocabulary(self, size: int) -> None:
        """Raises ValueError if the sampling names a token that a vocabulary of this size does not have."""
        if self.controls is not None and self.controls.largest_token >= size:
            raise ValueError(
                f"the sampling names token id {self.controls.largest_token}, which is not in the model's "
                f"vocabulary of {size} tokens: give ids from 0 to {size - 1}"
            )

    def recent_or_empty(self, recent: mx.array | None) -> mx.array | None:
        """The memory of recent tokens that the choice works with; None if it needs none.

        Args:
            recent: of a sequence; None if it has none, and then no token has been fed yet for the penalties.

        Raises:
            ValueError: the memory is of a sampling with other context sizes.
        """
        if self.controls is None or not self.controls.remembers:
            return None
        if recent is None:
            return self.controls.empty
        if recent.shape != self.controls.empty.shape:
            raise ValueError(
                f"the sequence remembers {recent.size} recent tokens and the sampling's penalties need "
                f"{self.controls.empty.size}: keep to the context sizes that it began with, or replace its `recent`"
            )
        return recent


@dataclass(frozen=True)
class Choice:
    """A chosen token.

    Attributes:
        token: uint32 [1].
        position: int32 [1], where it stands.
        logits: float32 [1, V], from which it was chosen, after biases and penalties.
        recent: uint32 [R], the recent tokens with those fed now; None if the sampling needs none.
    """

    token: mx.array
    position: mx.array
    logits: mx.array
    recent: mx.array | None


def choose(
    weights: ModelWeights,
    config: ModelConfig,
    x: mx.array,
    tokens: mx.array | None,
    position: mx.array,
    sampling: Sampling,
    recent: mx.array | None = None,
) -> Choice:
    """Chooses the token after the last one fed: 2 launches, or 3 with controls.

    Args:
        x: bfloat16 [1, H], the last token's row after the last layer.
        tokens: uint32 [M], the tokens fed now; controls need them.
        position: int32 [1], where the last one stands.
        sampling: how to choose.
        recent: uint32 [R], tokens fed before, see `Sampling.recent_or_empty`.

    Raises:
        ValueError: controls without `tokens`, or see `Sampling.recent_or_empty`.
    """
    controls, seed = sampling.controls, sampling.seed
    logits, best_value, best_index = head(
        x, weights.norm, weights.head, config.norm_eps, sampling.parameters, seed, position
    )
    if controls is None:
        return Choice(*select(best_value, best_index, position), logits, None)
    if tokens is None:
        raise ValueError("the sampling has filters or penalties: give the tokens that have been fed")
    memory = sampling.recent_or_empty(recent)
    adjusted, remembered, best_value, best_index, total = adjust(
        logits,
        tokens,
        position,
        controls.empty if memory is None else memory,
        controls.bias_ids,
        controls.bias_values,
        controls.settings,
        seed,
        controls.filtered,
    )
    if controls.filtered:
        token, following, _ = draw(
            adjusted, best_value, total, controls.special_tokens, controls.settings, seed, position
        )
    else:
        token, following = select(best_value, best_index, position)
    return Choice(token, following, adjusted, remembered if controls.remembers else None)
