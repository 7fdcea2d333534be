"""The choice of the next token for several sequences at once, each with its own settings."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from lily_mlx.kernels.linear.checks import SMALLEST_BUFFER, check_array
from lily_mlx.metal import Kernel

from .controls import adjust_kernel, check_vocabulary, draw_kernel, listed_tokens, vocabulary_parts
from .policy import ADJUST_SIMDGROUPS, SELECT_SIMDGROUPS, SLICE, draw_simdgroups
from .settings import SIZE

# The texts of `adjust`, `draw` and `select` under names of their own, so that profiles and the table of kernels tell a
# batch's launches from those of one sequence.
_ADJUST, _DRAW = adjust_kernel("batch_adjust"), draw_kernel("batch_draw")
_SELECT = Kernel(
    name="batch_select",
    inputs=("best_value", "best_index", "position"),
    outputs=("token", "next_position"),
    body="kernels/sampling/select.metal",
    headers=("kernels/sampling/argmax.h",),
)


@dataclass(frozen=True)
class RowControls:
    """How the tokens of B sequences are chosen.

    Attributes:
        settings: float32 [B, 16], see `Settings.array`, and 1 in place `UNFILTERED` of a sequence without filters.
        seed: uint32 [B].
        bias_ids, bias_values: uint32 and float32 [B, K], see `adjust`.
        special_tokens: uint32 [B, S], see `draw`.
        filtered: whether a sequence has filters.
    """

    settings: mx.array
    seed: mx.array
    bias_ids: mx.array
    bias_values: mx.array
    special_tokens: mx.array
    filtered: bool


def choose_rows(
    logits: mx.array, tokens: mx.array, position: mx.array, recent: mx.array, controls: RowControls
) -> tuple[mx.array, mx.array, mx.array]:
    """The next token of each sequence: what `adjust` and `draw`, or `select`, choose for it alone. Two launches.

    Args:
        logits: float32 [B, V].
        tokens: uint32 [B], the token that each sequence was fed now, B >= 2.
        position: int32 [B], where it stands.
        recent: uint32 [B, R], R a power of two from 8: tokens fed before, see `adjust`.
        controls: see `RowControls`.

    Returns:
        The tokens, uint32 [B]; the logits after biases and penalties, float32 [B, V]; and `recent` with `tokens`.

    Raises:
        ValueError: wrong shape, dtype or size.
    """
    check_array("logits", logits, (None, None), mx.float32)
    rows, vocabulary = logits.shape
    check_vocabulary(vocabulary)
    if rows < 2:
        raise ValueError(f"the logits are of {rows} sequence; give at least 2, or use adjust, draw and select")
    check_array("tokens", tokens, (rows,), mx.uint32)
    check_array("position", position, (rows,), mx.int32)
    check_array("seed", controls.seed, (rows,), mx.uint32)
    check_array("settings", controls.settings, (rows, SIZE), mx.float32)
    check_array("recent", recent, (rows, None), mx.uint32)
    if recent.shape[1] < SMALLEST_BUFFER or recent.shape[1] & (recent.shape[1] - 1):
        raise ValueError(f"recent has {recent.shape[1]} slots; expected a power of two from {SMALLEST_BUFFER}")
    check_array("bias_ids", controls.bias_ids, (rows, None), mx.uint32)
    check_array("bias_values", controls.bias_values, tuple(controls.bias_ids.shape), mx.float32)
    check_array("special_tokens", controls.special_tokens, (rows, None), mx.uint32)
    parts = vocabulary_parts(vocabulary)
    threads = 32 * ADJUST_SIMDGROUPS
    adjusted, next_recent, best_value, best_index, total = _ADJUST(
        [
            logits,
            tokens,
            position,
            recent.reshape(-1),
            controls.bias_ids.reshape(-1),
            controls.bias_values.reshape(-1),
            controls.settings,
            controls.seed,
        ],
        template={
            "SIMDGROUPS": ADJUST_SIMDGROUPS,
            "SLICE": SLICE,
            "FILTERED": controls.filtered,
            "ONE_EACH": True,
        },
        grid=(threads * parts, rows, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[logits.shape, recent.shape, (rows * parts,), (rows * parts,), (rows * parts,)],
        output_dtypes=[mx.float32, mx.uint32, mx.float32, mx.uint32, mx.float32],
    )
    if controls.filtered:
        listed = rows * listed_tokens(parts)
        threads = 32 * draw_simdgroups()
        token, *_ = _DRAW(
            [
                adjusted,
                best_value,
                total,
                controls.special_tokens.reshape(-1),
                controls.settings,
                controls.seed,
                position,
            ],
            template={"SIMDGROUPS": draw_simdgroups(), "SLICE": SLICE},
            grid=(threads * rows, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[*[(rows,)] * 5, *[(listed,)] * 3],
            output_dtypes=[mx.uint32, mx.int32, mx.float32, mx.uint32, mx.float32, mx.uint32, mx.uint32, mx.float32],
        )
    else:
        threads = 32 * SELECT_SIMDGROUPS
        token, _ = _SELECT(
            [best_value, best_index, position],
            template={"SIMDGROUPS": SELECT_SIMDGROUPS},
            grid=(threads * rows, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(rows,), (rows,)],
            output_dtypes=[mx.uint32, mx.int32],
        )
    return token, adjusted, next_recent
