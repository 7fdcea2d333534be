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

_PREPARE = Kernel(
    name="attention_step_prepare",
    inputs=("proj", "q_norm", "k_norm", "position", "turns", "tail_keys", "tail_values"),
    outputs=("q", "tail_keys_out", "tail_values_out"),
    body="kernels/attention/step_prepare.metal",
    headers=("kernels/attention/head.h",),
)
_PARTS = Kernel(
    name="attention_step_parts",
    inputs=("q", "keys", "values", "tail_keys", "tail_values", "position"),
    outputs=("partial", "stats"),
    body="kernels/attention/step_parts.metal",
    headers=("kernels/attention/head.h",),
)
_COMBINE = Kernel(
    name="attention_combine",
    inputs=("partial", "stats", "proj"),
    outputs=("out",),
    body="kernels/attention/combine.metal",
    headers=("metal/include/reduce.h",),
)
_PREPARE_SIMDGROUPS = 4
_COMBINE_THREADS = 256
_STAGED_FLOATS = 4096


def step_prepare(
    proj: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    position: mx.array,
    cache: KVCache,
    shape: AttentionShape,
    eps: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """Normalises and rotates one token's query and key and appends key and value to a copy of the tail.

    Args:
        proj: bfloat16 [1, P], the joined projection.
        q_norm, k_norm: bfloat16 [D], weights of the RMSNorms over a head (`mx.fast.rms_norm`).
        position: int32 [1], tokens before this one.
        cache: the cache of ``position`` tokens; it stays as it is.
        shape: the layer's shape.
        eps: of the RMSNorms (config ``rms_norm_eps``).

    Returns:
        q bfloat16 [Hq, D]; tail_keys and tail_values bfloat16 [Hkv, 128, D], rows after ``position % 128``
        undefined. One launch.

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_array("step_prepare", "proj", proj, (1, shape.projection_width), mx.bfloat16)
    check_norms("step_prepare", q_norm, k_norm, shape)
    check_position("step_prepare", position)
    check_cache("step_prepare", cache, shape.kv_heads, shape.head_dim)
    tail = (shape.kv_heads, TAIL_ROWS, shape.head_dim)
    tasks = shape.query_heads + shape.kv_heads * TAIL_ROWS
    threads = 32 * _PREPARE_SIMDGROUPS
    q, tail_keys, tail_values = _PREPARE(
        [
            proj,
            q_norm,
            k_norm,
            position,
            turns_per_position(shape.rotary_dim, shape.rope_theta),
            cache.tail_keys,
            cache.tail_values,
        ],
        template={
            "HQ": shape.query_heads,
            "HKV": shape.kv_heads,
            "D": shape.head_dim,
            "R": shape.rotary_dim,
            "TAIL": TAIL_ROWS,
            "EPS": float(eps),
        },
        grid=(-(-tasks // _PREPARE_SIMDGROUPS) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(shape.query_heads, shape.head_dim), tail, tail],
        output_dtypes=[mx.bfloat16] * 3,
    )
    return q, tail_keys, tail_values


def step_attention(
    q: mx.array,
    cache: KVCache,
    position: mx.array,
    proj: mx.array,
    shape: AttentionShape,
    plan: policy.PartsPlan | None = None,
) -> mx.array:
    """Attention of one token over the cache and itself, times the sigmoid of its output gate.

    Args:
        q: bfloat16 [Hq, D] of `step_prepare`.
        cache: the cache with the tail of `step_prepare`.
        position: int32 [1], tokens before this one; less than ``cache.capacity + 128``.
        proj: bfloat16 [1, P], the joined projection (its gate columns).
        shape: the layer's shape.
        plan: how the cache is shared; None: by the capacity.

    Returns:
        bfloat16 [1, Hq * D], rounded once, after the gate. Two launches.

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_array("step_attention", "q", q, (shape.query_heads, shape.head_dim), mx.bfloat16)
    check_cache("step_attention", cache, shape.kv_heads, shape.head_dim)
    check_position("step_attention", position)
    check_array("step_attention", "proj", proj, (1, shape.projection_width), mx.bfloat16)
    plan = plan or policy.parts_plan(cache.capacity, shape.group)
    parts = plan.main_parts(cache.capacity) + plan.tail_parts
    staged = max(1, _STAGED_FLOATS // (plan.head_sets * plan.streams * shape.head_dim))
    partial, stats = _PARTS(
        [q, cache.keys, cache.values, cache.tail_keys, cache.tail_values, position],
        template={
            "G": shape.group,
            "D": shape.head_dim,
            "TAIL": TAIL_ROWS,
            "PART": plan.part_rows,
            "HEADS": plan.heads,
            "PADDED": plan.padded_heads,
            "SETS": plan.head_sets,
            "STREAMS": plan.streams,
            "STAGED": min(staged, plan.heads),
            "SCALE": math.log2(math.e) / math.sqrt(shape.head_dim),
        },
        grid=(shape.kv_heads * plan.threads, parts, 1),
        threadgroup=(plan.threads, 1, 1),
        output_shapes=[(shape.query_heads, parts, shape.head_dim), (shape.query_heads, parts, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return combine(partial, stats, proj, shape)


def combine(partial: mx.array, stats: mx.array, proj: mx.array, shape: AttentionShape) -> mx.array:
    """Joins the parts of M * Hq query rows and applies the output gate.

    Args:
        partial: float32 [M * Hq, parts, D], sums of values not yet divided.
        stats: float32 [M * Hq, parts, 2], largest score (base 2) and sum of weights; (-inf, 0) for a part without rows.
        proj: bfloat16 [M, P], the joined projection (its gate columns).
        shape: the layer's shape.

    Returns:
        bfloat16 [M, Hq * D].
    """
    rows = partial.shape[0]
    (out,) = _COMBINE(
        [partial, stats, proj],
        template={"HQ": shape.query_heads, "D": shape.head_dim, "P": shape.projection_width},
        grid=(shape.head_dim // 32 * _COMBINE_THREADS, rows, 1),
        threadgroup=(_COMBINE_THREADS, 1, 1),
        output_shapes=[(rows // shape.query_heads, shape.query_heads * shape.head_dim)],
        output_dtypes=[mx.bfloat16],
    )
    return out
