"""Decode: one token against the cache."""

from __future__ import annotations

import math

import mlx.core as mx

from lily_mlx.kernels.checks import check_array
from lily_mlx.metal import Kernel

from . import policy
from .checks import check_cache, check_norms, check_position
from .rope import turns_per_position
from .shape import TAIL_ROWS, AttentionShape, KVCache

_PARTS = Kernel(
    name="attention_step_parts",
    inputs=("proj", "q_norm", "k_norm", "position", "turns", "keys", "values", "tail_keys", "tail_values"),
    outputs=("partial", "tail_keys_out", "tail_values_out"),
    body="kernels/attention/step_parts.metal",
    headers=("kernels/attention/head.h", "kernels/attention/parts.h"),
)
_COMBINE = Kernel(
    name="attention_combine",
    inputs=("partial", "proj"),
    outputs=("out",),
    body="kernels/attention/combine.metal",
    headers=("metal/include/reduce.h",),
)
_COMBINE_THREADS = 256
_STAGED_FLOATS = 4096


def step(
    proj: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    position: mx.array,
    cache: KVCache,
    shape: AttentionShape,
    eps: float,
    plan: policy.PartsPlan | None = None,
) -> tuple[mx.array, KVCache]:
    """Attention of one token over the cache and itself, times the sigmoid of its output gate.

    The token's query and key are normalised and rotated, and its key and value appended to a copy of the tail.

    Args:
        proj: bfloat16 [1, P], the joined projection.
        q_norm, k_norm: bfloat16 [D], weights of the RMSNorms over a head (`mx.fast.rms_norm`).
        position: int32 [1], tokens before this one; less than ``cache.capacity + 128``.
        cache: the cache of ``position`` tokens; it stays as it is.
        shape: the layer's shape.
        eps: of the RMSNorms (config ``rms_norm_eps``).
        plan: how the cache is shared; None: by the capacity.

    Returns:
        bfloat16 [1, Hq * D], rounded once, after the gate; and the cache with the new tail, whose rows after
        ``position % 128`` are undefined. Two launches.

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_array("step", "proj", proj, (1, shape.projection_width), mx.bfloat16)
    check_norms("step", q_norm, k_norm, shape)
    check_position("step", position)
    check_cache("step", cache, shape.kv_heads, shape.head_dim)
    plan = plan or policy.parts_plan(cache.capacity, shape.group)
    parts = plan.main_parts(cache.capacity) + plan.tail_parts
    tail = (shape.kv_heads, TAIL_ROWS, shape.head_dim)
    partial, tail_keys, tail_values = _PARTS(
        [
            proj,
            q_norm,
            k_norm,
            position,
            turns_per_position(shape.rotary_dim, shape.rope_theta),
            cache.keys,
            cache.values,
            cache.tail_keys,
            cache.tail_values,
        ],
        template=parts_template(shape, plan, eps) | {"PART": plan.part_rows},
        grid=(shape.kv_heads * plan.threads, parts, 1),
        threadgroup=(plan.threads, 1, 1),
        output_shapes=[(shape.query_heads, parts, shape.head_dim + 2), tail, tail],
        output_dtypes=[mx.float32, mx.bfloat16, mx.bfloat16],
    )
    return combine(partial, proj, shape), KVCache(cache.keys, cache.values, tail_keys, tail_values)


def parts_template(shape: AttentionShape, plan: policy.PartsPlan, eps: float) -> dict[str, int | float]:
    """Template values of the kernels that attend to a part of a cache."""
    staged = max(1, _STAGED_FLOATS // (plan.head_sets * plan.streams * shape.head_dim))
    return {
        "G": shape.group,
        "D": shape.head_dim,
        "R": shape.rotary_dim,
        "TAIL": TAIL_ROWS,
        "HEADS": plan.heads,
        "PADDED": plan.padded_heads,
        "SETS": plan.head_sets,
        "STREAMS": plan.streams,
        "STAGED": min(staged, plan.heads),
        "SCALE": math.log2(math.e) / math.sqrt(shape.head_dim),
        "EPS": float(eps),
    }


def combine(partial: mx.array, proj: mx.array, shape: AttentionShape) -> mx.array:
    """Joins the parts of M * Hq query rows and applies the output gate.

    Args:
        partial: float32 [M * Hq, parts, D + 2], one array for two: first [M * Hq, parts, D], sums of values not yet
            divided, then, so that both are aligned, [M * Hq, parts, 2], largest score (base 2) and sum of weights;
            (-inf, 0) for a part without rows.
        proj: bfloat16 [M, P], the joined projection (its gate columns).
        shape: the layer's shape.

    Returns:
        bfloat16 [M, Hq * D].
    """
    rows = partial.shape[0]
    (out,) = _COMBINE(
        [partial, proj],
        template={"HQ": shape.query_heads, "D": shape.head_dim, "P": shape.projection_width},
        grid=(shape.head_dim // 32 * _COMBINE_THREADS, rows, 1),
        threadgroup=(_COMBINE_THREADS, 1, 1),
        output_shapes=[(rows // shape.query_heads, shape.query_heads * shape.head_dim)],
        output_dtypes=[mx.bfloat16],
    )
    return out
