"""Decode of several sequences at once: one token of each against its own pages of a shared pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from lily_mlx.kernels.checks import check_array, check_rows
from lily_mlx.metal import Kernel

from . import policy
from .checks import check_norms
from .decode import parts_template
from .rope import turns_per_position
from .shape import TAIL_ROWS, AttentionShape

_PARTS = Kernel(
    name="attention_batch_parts",
    inputs=(
        "proj",
        "q_norm",
        "k_norm",
        "places",
        "items",
        "turns",
        "keys",
        "values",
        "young_keys",
        "young_values",
        "tail_keys",
        "tail_values",
    ),
    outputs=("partial", "tail_keys_out", "tail_values_out"),
    body="kernels/attention/batch_parts.metal",
    headers=("kernels/attention/head.h", "kernels/attention/parts.h"),
)
_COMBINE = Kernel(
    name="attention_batch_combine",
    inputs=("partial", "proj", "places"),
    outputs=("out",),
    body="kernels/attention/batch_combine.metal",
    headers=("metal/include/reduce.h",),
)
_COMBINE_THREADS = 256
_ITEM_STEPS = 4  # sizes of the list of items between one power of two and the next
_FEWEST_ITEMS = 16
YOUNG_PAGE = -2  # in place of a page's number, see PagedCache


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of B sequences in one layer.

    A page is a block of TAIL_ROWS rows of one sequence. Sequence b of n tokens has n // TAIL_ROWS pages anywhere in the
    pool, and its last n % TAIL_ROWS rows in its tail. One of its pages may be young: outside the pool, so that a full
    tail becomes a page without a new pool, and many young pages move into it at once. Pages and rows that no sequence
    has are undefined.

    Attributes:
        keys, values: bfloat16 [pages, Hkv, TAIL_ROWS, D], the pool, with at least one page.
        young_keys, young_values: bfloat16 [B, Hkv, TAIL_ROWS, D], a page of each sequence.
        tail_keys, tail_values: bfloat16 [B, Hkv, TAIL_ROWS, D].
    """

    keys: mx.array
    values: mx.array
    young_keys: mx.array
    young_values: mx.array
    tail_keys: mx.array
    tail_values: mx.array


@dataclass(frozen=True)
class Work:
    """What a step of B sequences reads of their caches; the layers share it.

    Attributes:
        places: int32 [B, 4]: position of the new token, first item, items, 0.
        items: int32 [W, 2]: a sequence and one of its pages, YOUNG_PAGE, or -1 for its tail; sequence -1: unused.
    """

    places: mx.array
    items: mx.array


def item_capacity(count: int) -> int:
    """Items to allocate for ``count`` of them: at most a quarter more, in steps, so that few sizes occur."""
    if count <= _FEWEST_ITEMS:
        return _FEWEST_ITEMS
    step = max(1, (1 << (count - 1).bit_length()) // 2 // _ITEM_STEPS)
    return -(-count // step) * step


def lay_out(
    positions: Sequence[int], pages: Sequence[Sequence[int]], twins: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of `Work`, in NumPy.

    Args:
        positions: tokens of each sequence before the new one.
        pages: for each sequence its pages in the pool, in order, ``positions[b] // TAIL_ROWS`` of them; one may be
            YOUNG_PAGE.
        twins: for each row of the batch behind these a sequence that it repeats: it gets that one's result, costs no
            item, and its new tail stays undefined.

    Raises:
        ValueError: a sequence has another number of pages than its length needs.
    """
    places = np.zeros((len(positions) + len(twins), 4), np.int32)
    items: list[np.ndarray] = []
    first = 0
    for row, (position, own) in enumerate(zip(positions, pages, strict=True)):
        if position < 0 or len(own) != position // TAIL_ROWS:
            raise ValueError(f"lay_out: sequence {row} of {position} tokens has {len(own)} pages of {TAIL_ROWS} rows")
        block = np.full((len(own) + 1, 2), row, np.int32)
        block[:-1, 1], block[-1, 1] = own, -1
        places[row] = position, first, len(block), 0
        items.append(block)
        first += len(block)
    places[len(positions) :] = places[list(twins)]
    unused = np.full((item_capacity(first) - first, 2), -1, np.int32)
    return places, np.concatenate([*items, unused])


def make_work(positions: Sequence[int], pages: Sequence[Sequence[int]], twins: Sequence[int] = ()) -> Work:
    """What a step reads, from the lengths and pages of its sequences; see `lay_out`."""
    return Work(*map(mx.array, lay_out(positions, pages, twins)))


def batch_step(
    proj: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    work: Work,
    cache: PagedCache,
    shape: AttentionShape,
    eps: float,
    plan: policy.PartsPlan | None = None,
) -> tuple[mx.array, PagedCache]:
    """`step` of B sequences, each with its own length: two launches for all of them.

    A sequence's result does not depend on the others, nor on where its pages are.

    Args:
        proj: bfloat16 [B, P], the joined projection, a row for each sequence, B >= 2.
        q_norm, k_norm: bfloat16 [D], weights of the RMSNorms over a head (`mx.fast.rms_norm`).
        work: positions and pages, from `make_work`.
        cache: the cache of the tokens before; it stays as it is.
        shape: the layer's shape.
        eps: of the RMSNorms (config ``rms_norm_eps``).
        plan: how simdgroups share the heads and rows of a page, with ``part_rows`` TAIL_ROWS; None: by the group.

    Returns:
        bfloat16 [B, Hq * D], rounded once, after the gate; and the cache with new tails, whose rows after
        ``position % TAIL_ROWS`` are undefined.

    Raises:
        ValueError: wrong shape or dtype.
    """
    where = "batch_step"
    rows = check_rows(where, "proj", proj, (shape.projection_width,), mx.bfloat16)
    check_norms(where, q_norm, k_norm, shape)
    check_array(where, "work.places", work.places, (rows, 4), mx.int32)
    items = check_rows(where, "work.items", work.items, (2,), mx.int32)
    if rows < 2 or items < 4:
        raise ValueError(f"{where}: {rows} sequences and {items} items; give at least 2 and 4 (see make_work)")
    page = (shape.kv_heads, TAIL_ROWS, shape.head_dim)
    pages = check_rows(where, "cache.keys", cache.keys, page, mx.bfloat16)
    check_array(where, "cache.values", cache.values, (pages, *page), mx.bfloat16)
    for name in ("young_keys", "young_values", "tail_keys", "tail_values"):
        check_array(where, f"cache.{name}", getattr(cache, name), (rows, *page), mx.bfloat16)
    plan = plan or policy.batch_plan(shape.group)
    if plan.part_rows != TAIL_ROWS:
        raise ValueError(f"{where}: the plan has parts of {plan.part_rows} rows; a page has {TAIL_ROWS}")
    partial, tail_keys, tail_values = _PARTS(
        [
            proj,
            q_norm,
            k_norm,
            work.places,
            work.items,
            turns_per_position(shape.rotary_dim, shape.rope_theta),
            cache.keys,
            cache.values,
            cache.young_keys,
            cache.young_values,
            cache.tail_keys,
            cache.tail_values,
        ],
        template=parts_template(shape, plan, eps) | {"P": shape.projection_width},
        grid=(shape.kv_heads * plan.threads, items, 1),
        threadgroup=(plan.threads, 1, 1),
        output_shapes=[(items, shape.query_heads, shape.head_dim + 2), (rows, *page), (rows, *page)],
        output_dtypes=[mx.float32, mx.bfloat16, mx.bfloat16],
    )
    (out,) = _COMBINE(
        [partial, proj, work.places],
        template={"HQ": shape.query_heads, "D": shape.head_dim, "P": shape.projection_width},
        grid=(shape.head_dim // 32 * _COMBINE_THREADS, rows * shape.query_heads, 1),
        threadgroup=(_COMBINE_THREADS, 1, 1),
        output_shapes=[(rows, shape.query_heads * shape.head_dim)],
        output_dtypes=[mx.bfloat16],
    )
    return out, replace(cache, tail_keys=tail_keys, tail_values=tail_values)
