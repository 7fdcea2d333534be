"""Prefill: a chunk of tokens against the cache that already holds them."""

from __future__ import annotations

import math

import mlx.core as mx

from lily_mlx.kernels.checks import check_array, check_rows
from lily_mlx.metal import Kernel, current_backend

from . import policy
from .checks import check_cache, check_norms, check_position
from .decode import combine
from .rope import turns_per_position
from .shape import TAIL_ROWS, AttentionShape, KVCache

_PREPARE = Kernel(
    name="attention_prepare",
    inputs=("proj", "q_norm", "k_norm", "position", "turns"),
    outputs=("q", "k"),
    body="kernels/attention/prepare.metal",
    headers=("kernels/attention/head.h",),
)
_INPUTS = ("q", "keys", "values", "tail_keys", "tail_values", "position")
_HEADERS = (
    "metal/include/fragment.h",
    "metal/include/tile.h",
    "metal/include/copy.h",
    "kernels/attention/causal.h",
)
_ATTENTION = Kernel(
    name="attention_prefill",
    inputs=(*_INPUTS, "proj"),
    outputs=("out",),
    body="kernels/attention/prefill_attention.metal",
    headers=_HEADERS,
)
_PARTS = Kernel(
    name="attention_prefill_parts",
    inputs=_INPUTS,
    outputs=("partial",),
    body="kernels/attention/prefill_parts.metal",
    headers=_HEADERS,
)
_PREPARE_SIMDGROUPS = 4


def prepare(
    proj: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    position: mx.array,
    shape: AttentionShape,
    eps: float,
) -> tuple[mx.array, mx.array]:
    """Normalises and rotates the queries and keys of a chunk.

    Args:
        proj: bfloat16 [M, P], the joined projection.
        q_norm, k_norm: bfloat16 [D], weights of the RMSNorms over a head (`mx.fast.rms_norm`).
        position: int32 [1], tokens before the chunk.
        shape: the layer's shape.
        eps: of the RMSNorms (config ``rms_norm_eps``).

    Returns:
        q bfloat16 [M, Hq, D] and k bfloat16 [M, Hkv, D]. One launch.

    Raises:
        ValueError: wrong shape or dtype.
    """
    tokens = check_rows("prepare", "proj", proj, (shape.projection_width,), mx.bfloat16)
    check_norms("prepare", q_norm, k_norm, shape)
    check_position("prepare", position)
    tasks = tokens * (shape.query_heads + shape.kv_heads)
    threads = 32 * _PREPARE_SIMDGROUPS
    q, k = _PREPARE(
        [proj, q_norm, k_norm, position, turns_per_position(shape.rotary_dim, shape.rope_theta)],
        template={
            "HQ": shape.query_heads,
            "HKV": shape.kv_heads,
            "D": shape.head_dim,
            "R": shape.rotary_dim,
            "P": shape.projection_width,
            "EPS": float(eps),
        },
        grid=(-(-tasks // _PREPARE_SIMDGROUPS) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(tokens, shape.query_heads, shape.head_dim), (tokens, shape.kv_heads, shape.head_dim)],
        output_dtypes=[mx.bfloat16, mx.bfloat16],
    )
    return q, k


def prefill_attention(
    q: mx.array,
    cache: KVCache,
    position: mx.array,
    proj: mx.array,
    shape: AttentionShape,
    plan: policy.PrefillPlan | None = None,
) -> mx.array:
    """Causal attention of a chunk over all tokens up to each of its own, times the sigmoid of the output gate.

    Args:
        q: bfloat16 [M, Hq, D] of `prepare`.
        cache: the cache after `append` of the chunk; rows after its last token are never read.
        position: int32 [1], tokens before the chunk.
        proj: bfloat16 [M, P], the joined projection (its gate columns).
        shape: the layer's shape.
        plan: tiles, and whether the keys are shared; None: by M and the capacity.

    Returns:
        bfloat16 [M, Hq * D], rounded once, after the gate. One launch, or two for few rows over a long cache.

    Raises:
        ValueError: wrong shape or dtype.
    """
    where = "prefill_attention"
    tokens = check_rows(where, "q", q, (shape.query_heads, shape.head_dim), mx.bfloat16)
    check_cache(where, cache, shape.kv_heads, shape.head_dim)
    check_position(where, position)
    check_array(where, "proj", proj, (tokens, shape.projection_width), mx.bfloat16)
    rows = tokens * shape.group
    plan = plan or policy.prefill_plan(rows, shape.kv_heads, cache.capacity, wide=current_backend() == "cuda")
    inputs = [q, cache.keys, cache.values, cache.tail_keys, cache.tail_values, position]
    template = {
        "HQ": shape.query_heads,
        "G": shape.group,
        "D": shape.head_dim,
        "TAIL": TAIL_ROWS,
        "M": plan.simdgroup_rows,
        "SIMDGROUPS": plan.simdgroups,
        "KEYS": plan.keys,
        "COLUMNS": 64 if shape.head_dim % 64 == 0 else 32,
        "SCALE": math.log2(math.e) / math.sqrt(shape.head_dim),
    }
    blocks = plan.blocks(rows)
    if plan.part_keys is None:
        (out,) = _ATTENTION(
            [*inputs, proj],
            template=template | {"P": shape.projection_width},
            grid=(shape.kv_heads * plan.threads, blocks, 1),
            threadgroup=(plan.threads, 1, 1),
            output_shapes=[(tokens, shape.query_heads * shape.head_dim)],
            output_dtypes=[mx.bfloat16],
        )
        return out
    parts = plan.parts(cache.capacity)
    outputs = tokens * shape.query_heads
    (partial,) = _PARTS(
        inputs,
        template=template | {"PART": plan.part_keys},
        grid=(shape.kv_heads * plan.threads, blocks, parts),
        threadgroup=(plan.threads, 1, 1),
        output_shapes=[(outputs, parts, shape.head_dim + 2)],
        output_dtypes=[mx.float32],
    )
    return combine(partial, proj, shape)
