"""The end of a step that does more than the temperature: bias and penalties, then a filtered draw."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.linear.checks import SMALLEST_BUFFER, check_array
from lily_mlx.metal import Kernel

from .policy import ADJUST_SIMDGROUPS, MOST_PARTS, SLICE, draw_simdgroups
from .settings import SIZE

# A token id that no vocabulary has: fills slots and lists.
NO_TOKEN = 0xFFFFFFFF

_HEADERS = (
    "kernels/moe/select.h",
    "kernels/sampling/settings.h",
    "kernels/sampling/random.h",
    "kernels/sampling/argmax.h",
    "kernels/sampling/filters.h",
)


def adjust_kernel(name: str) -> Kernel:
    """The kernel of `adjust`, for one sequence or several, under a name of its own."""
    return Kernel(
        name=name,
        inputs=("logits", "tokens", "position", "recent", "bias_ids", "bias_values", "settings", "seed"),
        outputs=("adjusted", "next_recent", "best_value", "best_index", "total"),
        body="kernels/sampling/adjust.metal",
        headers=_HEADERS,
    )


def draw_kernel(name: str) -> Kernel:
    """The kernel of `draw`, for one sequence or several, under a name of its own."""
    lists = ("all_keys", "all_ids", "all_weights")
    return Kernel(
        name=name,
        inputs=("logits", "largest", "total", "special_tokens", "settings", "seed", "position"),
        outputs=("token", "next_position", "lowest_logit", "last_token", "highest_logit", *lists),
        body="kernels/sampling/draw.metal",
        headers=_HEADERS,
    )


_ADJUST, _DRAW = adjust_kernel("adjust"), draw_kernel("draw")


def adjust(
    logits: mx.array,
    tokens: mx.array,
    position: mx.array,
    recent: mx.array,
    bias_ids: mx.array,
    bias_values: mx.array,
    settings: mx.array,
    seed: mx.array,
    filtered: bool,
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """Bias and penalties, in mlx_lm's order, and what the choice needs of each part of the vocabulary.

    Args:
        logits: float32 [1, V] from `head`, V from 8 to 4,096 parts.
        tokens: uint32 [M], the tokens fed now, M >= 1; of a long chunk the last R are enough.
        position: int32 [1], the last one's position.
        recent: uint32 [R], R a power of two from 8: the tokens fed before, the one at position p in slot p % R,
            and `NO_TOKEN` in empty slots.
        bias_ids: uint32 [B], B at least 8, distinct ids, and `NO_TOKEN` in unused places.
        bias_values: float32 [B], added to their logits.
        settings: float32 [16], see `Settings.array`.
        seed: uint32 [1], see `head`.
        filtered: whether `draw` follows, or `select`.

    Returns:
        The adjusted logits float32 [1, V]; `recent` with `tokens`; best_value float32 [P], best_index uint32 [P]
        for `select`, or best_value and total float32 [P] for `draw`.

    Raises:
        ValueError: wrong shape, dtype or size.
    """
    check_array("logits", logits, (1, None), mx.float32)
    check_array("tokens", tokens, (None,), mx.uint32)
    check_array("position", position, (1,), mx.int32)
    check_array("recent", recent, (None,), mx.uint32)
    check_array("bias_ids", bias_ids, (None,), mx.uint32)
    check_array("bias_values", bias_values, (bias_ids.shape[0],), mx.float32)
    check_array("settings", settings, (SIZE,), mx.float32)
    check_array("seed", seed, (1,), mx.uint32)
    vocabulary, slots = logits.shape[1], recent.shape[0]
    check_vocabulary(vocabulary)
    if slots < SMALLEST_BUFFER or slots & (slots - 1):
        raise ValueError(f"recent has {slots} slots; expected a power of two from {SMALLEST_BUFFER}")
    if bias_ids.shape[0] < SMALLEST_BUFFER:
        raise ValueError(f"{bias_ids.shape[0]} biases; fill the list with NO_TOKEN up to {SMALLEST_BUFFER}")
    parts = vocabulary_parts(vocabulary)
    threads = 32 * ADJUST_SIMDGROUPS
    adjusted, next_recent, best_value, best_index, total = _ADJUST(
        [logits, tokens, position, recent, bias_ids, bias_values, settings, seed],
        template={"SIMDGROUPS": ADJUST_SIMDGROUPS, "SLICE": SLICE, "FILTERED": filtered, "ONE_EACH": False},
        grid=(threads * parts, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(1, vocabulary), (slots,), (parts,), (parts,), (parts,)],
        output_dtypes=[mx.float32, mx.uint32, mx.float32, mx.uint32, mx.float32],
    )
    return adjusted, next_recent, best_value, best_index, total


def draw(
    logits: mx.array,
    largest: mx.array,
    total: mx.array,
    special_tokens: mx.array,
    settings: mx.array,
    seed: mx.array,
    position: mx.array,
) -> tuple[mx.array, mx.array, tuple[mx.array, mx.array, mx.array]]:
    """Draws the next token from those that top-p, min-p, XTC and top-k keep, in mlx_lm's order.

    Args:
        logits, largest, total: float32 [1, V], [P], [P], from `adjust`.
        special_tokens: uint32 [S], S at least 8: ids that XTC never drops, and `NO_TOKEN` in unused places.
        settings: float32 [16], see `Settings.array`; the temperature is above 0.
        seed, position: see `head`.

    Returns:
        token uint32 [1]; position + 1, int32 [1]; and what was kept: lowest float32 [1], last uint32 [1], highest
        float32 [1]. A token was kept if its logit is above `lowest`, or equal and its id at most `last`; and, unless
        it is special, not above `highest`.

    Raises:
        ValueError: wrong shape, dtype or size.
    """
    check_array("logits", logits, (1, None), mx.float32)
    vocabulary = logits.shape[1]
    check_vocabulary(vocabulary)
    parts = vocabulary_parts(vocabulary)
    check_array("largest", largest, (parts,), mx.float32)
    check_array("total", total, (parts,), mx.float32)
    check_array("special_tokens", special_tokens, (None,), mx.uint32)
    check_array("settings", settings, (SIZE,), mx.float32)
    check_array("seed", seed, (1,), mx.uint32)
    check_array("position", position, (1,), mx.int32)
    if special_tokens.shape[0] < SMALLEST_BUFFER:
        raise ValueError(
            f"{special_tokens.shape[0]} special tokens; fill the list with NO_TOKEN up to {SMALLEST_BUFFER}"
        )
    simdgroups = draw_simdgroups()
    listed = listed_tokens(parts)
    token, next_position, lowest, last, highest, *_ = _DRAW(
        [logits, largest, total, special_tokens, settings, seed, position],
        template={"SIMDGROUPS": simdgroups, "SLICE": SLICE},
        grid=(32 * simdgroups, 1, 1),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[(1,), (1,), (1,), (1,), (1,), (listed,), (listed,), (listed,)],
        output_dtypes=[
            mx.uint32,
            mx.int32,
            mx.float32,
            mx.uint32,
            mx.float32,
            mx.uint32,
            mx.uint32,
            mx.float32,
        ],
    )
    return token, next_position, (lowest, last, highest)


def vocabulary_parts(vocabulary: int) -> int:
    """Parts of the vocabulary that `adjust` reports on."""
    return -(-vocabulary // SLICE)


def listed_tokens(parts: int) -> int:
    """Places in the lists of `draw`: every thread can list all tokens of its share."""
    simdgroups = draw_simdgroups()
    return -(-parts // simdgroups) * SLICE * simdgroups


def check_vocabulary(vocabulary: int) -> None:
    """Raises ValueError unless the kernels can choose from so many tokens."""
    most = MOST_PARTS * SLICE
    if not SMALLEST_BUFFER <= vocabulary <= most:
        raise ValueError(f"the vocabulary has {vocabulary} tokens; expected {SMALLEST_BUFFER} to {most}")
