"""Without the ways in which decode attention reads the cache: coalesced, once for all heads, in growing parts.

The alternatives and their control take a token's query, key and value from the kernels of a prompt, in two more launches
than the engine.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path

import mlx.core as mx

from lily_mlx.kernels import attention
from lily_mlx.kernels.attention import TAIL_ROWS, AttentionShape, KVCache
from lily_mlx.kernels.attention.decode import combine
from lily_mlx.metal import Kernel

from .form import replaced

_HERE = str(Path(__file__).resolve().parent)
_PARTS = Kernel(
    name="ablation_attention_parts",
    inputs=("q", "keys", "values", "tail_keys", "tail_values", "position"),
    outputs=("partial",),
    body=f"{_HERE}/attention_parts.metal",
    headers=("kernels/attention/head.h", f"{_HERE}/attention_parts.h"),
)
_STREAMS = 8
_PACKED_HEADS = 8  # a lane keeps queries and sums of at most so many heads in registers
FIXED_PARTS = 64


def uncoalesced_reads() -> AbstractContextManager[None]:
    """Lanes load their dimensions of a key or value one by one, 16 bytes apart from each other."""
    return _attention(coalesced=False)


def unpacked_heads() -> AbstractContextManager[None]:
    """Each query head has its own threadgroups, which read the rows of its KV head for it alone."""
    return _attention(packed=False)


def fixed_part_count() -> AbstractContextManager[None]:
    """The cache is cut into 64 parts, as at 4,096 tokens, however long it is."""
    return _attention(growing=False)


def own_attention() -> AbstractContextManager[None]:
    """The control: the alternatives' kernel with all three mechanisms on."""
    return _attention()


def attend(
    q: mx.array,
    cache: KVCache,
    position: mx.array,
    proj: mx.array,
    shape: AttentionShape,
    coalesced: bool = True,
    packed: bool = True,
    growing: bool = True,
) -> mx.array:
    """Gated attention bfloat16 [1, Hq * D] of one token whose key and value are in the tail already. Two launches.

    Args:
        q: bfloat16 [Hq, D], after norm and rotation.
        cache: of ``position`` + 1 tokens, the last in the tail.
        position: int32 [1].
        proj: bfloat16 [1, P], the joined projection (its gate columns).
        shape: the layer's shape.
        coalesced, packed, growing: the three mechanisms.
    """
    part = _part_rows(cache.capacity) if growing else -(-cache.capacity // (FIXED_PARTS * 32)) * 32
    heads = math.gcd(shape.group, _PACKED_HEADS) if packed else 1
    parts = -(-cache.capacity // part) + -(-TAIL_ROWS // part)
    (partial,) = _PARTS(
        [q, cache.keys, cache.values, cache.tail_keys, cache.tail_values, position],
        template={
            "G": shape.group,
            "D": shape.head_dim,
            "TAIL": TAIL_ROWS,
            "PART": part,
            "HEADS": heads,
            "PADDED": 1 << (heads - 1).bit_length(),
            "STREAMS": _STREAMS,
            "COALESCED": coalesced,
            "SCALE": math.log2(math.e) / math.sqrt(shape.head_dim),
        },
        grid=(shape.query_heads // heads * 32 * _STREAMS, parts, 1),
        threadgroup=(32 * _STREAMS, 1, 1),
        output_shapes=[(shape.query_heads, parts, shape.head_dim + 2)],
        output_dtypes=[mx.float32],
    )
    return combine(partial, proj, shape)


def _attention(**mechanisms: bool) -> AbstractContextManager[None]:
    def step(
        proj: mx.array,
        q_norm: mx.array,
        k_norm: mx.array,
        position: mx.array,
        cache: KVCache,
        shape: AttentionShape,
        eps: float,
    ) -> tuple[mx.array, KVCache]:
        q, k = attention.prepare(proj, q_norm, k_norm, position, shape, eps)
        # The length only tells `append` whether keys and values grow, which one token never makes them.
        cache = attention.append(cache, k, proj, position, 0, shape)
        return attend(q[0], cache, position, proj, shape, **mechanisms), cache

    return replaced(attention, step=step)


def _part_rows(capacity: int) -> int:
    """Rows of a part, growing with the capacity so that the parts fill a device and stay small next to the cache."""
    return next((rows for limit, rows in ((4096, 64), (16384, 128), (65536, 256)) if capacity <= limit), 512)
