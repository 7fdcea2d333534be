"""Inputs and calls that the tests of `adjust` and `draw` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from lily_mlx.kernels import sampling
from lily_mlx.kernels.sampling import NO_TOKEN, Settings, reference


def filled(tokens: Sequence[int], size: int = 8) -> np.ndarray:
    """Token ids with `NO_TOKEN` behind them."""
    padded = np.full(max(size, len(tokens)), NO_TOKEN, np.uint32)
    padded[: len(tokens)] = tokens
    return padded


@dataclass
class Case:
    """One call of `adjust`, and of `draw` after it.

    Attributes:
        logits: float32 [V].
        settings: what to do.
        tokens: fed now; the last one stands at `position`.
        recent: slots of the tokens fed before.
        bias: additions by token id.
        special: tokens that XTC never drops.
    """

    logits: np.ndarray
    settings: Settings
    tokens: Sequence[int] = (0,)
    position: int = 40
    seed: int = 3
    recent: np.ndarray = field(default_factory=lambda: filled([], 32))
    bias: dict[int, float] = field(default_factory=dict)
    special: Sequence[int] = ()

    @property
    def _arrays(self) -> list[np.ndarray]:
        return [
            np.asarray(self.logits, np.float32)[None],
            np.array(self.tokens, np.uint32),
            np.array([self.position], np.int32),
            self.recent,
            filled(list(self.bias)),
            np.array([*self.bias.values(), *[0.0] * (8 - len(self.bias))], np.float32),
        ]

    def adjust(self, filtered: bool):
        arrays = [mx.array(array) for array in self._arrays]
        return sampling.adjust(*arrays, self.settings.array(), mx.array([self.seed], mx.uint32), filtered)

    def adjust_reference(self, filtered: bool):
        return reference.adjust(*self._arrays, self.settings, np.array([self.seed]), filtered)

    def draw(self) -> tuple[int, np.ndarray]:
        """The token, and which tokens were kept."""
        logits, _, largest, _, total = self.adjust(filtered=True)
        token, position, (lowest, last, highest) = sampling.draw(
            logits,
            largest,
            total,
            mx.array(filled(self.special)),
            self.settings.array(),
            mx.array([self.seed], mx.uint32),
            mx.array([self.position], mx.int32),
        )
        assert (token.dtype, token.shape, position.dtype) == (mx.uint32, (1,), mx.int32)
        assert position.item() == self.position + 1
        values = np.array(logits)[0]
        values = np.where(np.isnan(values), -np.inf, values)
        ids = np.arange(values.size)
        kept = (values > lowest.item()) | ((values == lowest.item()) & (ids <= last.item()))
        kept &= (values <= highest.item()) | np.isin(ids, self.special)
        return token.item(), kept

    def draw_reference(self) -> tuple[int, np.ndarray]:
        adjusted, _, _, _, _ = self.adjust_reference(filtered=True)
        token, _, kept = reference.draw(
            adjusted,
            None,
            None,
            np.array(self.special, np.int64),
            self.settings,
            np.array([self.seed]),
            np.array([self.position]),
        )
        return int(token[0]), kept
