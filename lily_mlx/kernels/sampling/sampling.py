"""The end of a decode step: logits of one row, and the next token chosen on the device."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear.checks import (
    SMALLEST_BUFFER,
    check_array,
    check_matrix,
    check_staged,
    weight_template,
)
from lily_mlx.kernels.linear.policy import matvec_plan
from lily_mlx.metal import Kernel

from .policy import MOST_PARTS, SELECT_SIMDGROUPS, head_parts

_HEAD = Kernel(
    name="head",
    inputs=("x", "norm_weight", "weight", "sampling", "seed", "position"),
    outputs=("logits", "best_value", "best_index"),
    body="kernels/sampling/head.metal",
    headers=(
        "metal/include/quantized.h",
        "kernels/linear/matvec.h",
        "kernels/linear/prologue.h",
        "kernels/sampling/random.h",
        "kernels/sampling/argmax.h",
    ),
)
_SELECT = Kernel(
    name="select",
    inputs=("best_value", "best_index", "position"),
    outputs=("token", "next_position"),
    body="kernels/sampling/select.metal",
    headers=("kernels/sampling/argmax.h",),
)


def head(
    x: mx.array,
    norm_weight: mx.array,
    w: QuantizedWeight,
    eps: float,
    sampling: mx.array,
    seed: mx.array,
    position: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """Final norm, output projection, and the best token of each part of the vocabulary.

    A token is best by its logit at temperature 0, and otherwise by logit / temperature + Gumbel noise, which
    makes the best of all a draw from softmax(logits / temperature) (the Gumbel-max trick).

    Args:
        x: bfloat16 [1, K], K at most 8,192.
        norm_weight: bfloat16 [K], the final norm's gain.
        w: the output projection [V, K], V at least 8.
        eps: added to the mean square (config ``rms_norm_eps``).
        sampling: float32 [8]: the temperature, then zeros. A temperature of at most 0 means greedy.
        seed: uint32 [1], the key of the noise.
        position: int32 [1], the position of x in its sequence. Seed, position and token id decide the noise.

    Returns:
        logits float32 [1, V]; best_value float32 [P] and best_index uint32 [P] for `select`.

    Raises:
        ValueError: wrong shape, dtype or size.
    """
    check_matrix(w)
    check_array("x", x, (1, w.columns))
    check_array("norm_weight", norm_weight, (w.columns,))
    check_array("sampling", sampling, (8,), mx.float32)
    check_array("seed", seed, (1,), mx.uint32)
    check_array("position", position, (1,), mx.int32)
    check_staged(w.columns)
    if w.rows < SMALLEST_BUFFER:
        raise ValueError(f"the vocabulary has {w.rows} tokens; expected at least {SMALLEST_BUFFER}")
    plan = matvec_plan(w.rows, w.columns, w.bits)
    parts = head_parts(plan.blocks(w.rows))
    logits, best_value, best_index = _HEAD(
        [x, norm_weight, w.packed, sampling, seed, position],
        template={**weight_template(w), **plan.template(), "EPS": float(eps)},
        grid=(plan.threads * parts, 1, 1),
        threadgroup=(plan.threads, 1, 1),
        output_shapes=[(1, w.rows), (parts,), (parts,)],
        output_dtypes=[mx.float32, mx.float32, mx.uint32],
    )
    return logits, best_value, best_index


def select(best_value: mx.array, best_index: mx.array, position: mx.array) -> tuple[mx.array, mx.array]:
    """The best of all parts, as the next token's slot, and the next position.

    Equal values go to the lower token id.

    Args:
        best_value: float32 [P], P at most 4,096.
        best_index: uint32 [P].
        position: int32 [1].

    Returns:
        token uint32 [1]; position + 1, int32 [1].

    Raises:
        ValueError: wrong shape or dtype, or too many parts.
    """
    check_array("best_value", best_value, (None,), mx.float32)
    parts = best_value.shape[0]
    check_array("best_index", best_index, (parts,), mx.uint32)
    check_array("position", position, (1,), mx.int32)
    if parts > MOST_PARTS:
        raise ValueError(f"{parts} parts; one threadgroup takes at most {MOST_PARTS}")
    threads = 32 * SELECT_SIMDGROUPS
    token, next_position = _SELECT(
        [best_value, best_index, position],
        template={"SIMDGROUPS": SELECT_SIMDGROUPS},
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(1,), (1,)],
        output_dtypes=[mx.uint32, mx.int32],
    )
    return token, next_position
