"""Routing of a chunk on the device: expert choice, stable sort by expert, block map.

One launch for a short chunk, three for others, and no host read.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from lily_mlx.metal import Kernel

from . import policy

MAX_EXPERTS = 512
MAX_TOP_K = 32
MAX_PAIRS = 1 << 30

_SELECT = Kernel(
    name="moe_select_experts",
    inputs=("logits",),
    outputs=("experts", "scores"),
    body="kernels/moe/select_experts.metal",
    headers=("kernels/moe/select.h",),
)
_SORT = Kernel(
    name="moe_sort_rows",
    inputs=("experts",),
    outputs=("offsets", "row_tokens", "slot_rows"),
    body="kernels/moe/sort_rows.metal",
)
_MAP = Kernel(
    name="moe_map_blocks",
    inputs=("experts", "offsets"),
    outputs=("blocks",),
    body="kernels/moe/map_blocks.metal",
)
_ROUTE_ROWS = Kernel(
    name="moe_route_rows",
    inputs=("logits",),
    outputs=("experts", "scores", "offsets", "row_tokens", "slot_rows", "blocks"),
    body="kernels/moe/route_rows.metal",
    headers=("kernels/moe/select.h",),
)


@dataclass(frozen=True)
class Routing:
    """Where every (token, slot) pair of a chunk goes. M tokens, S = M * top_k pairs, E routed experts.

    The grouped matmuls work on S + M rows: the pairs sorted by expert (in token order inside an expert), then
    one row per token for the shared expert.
    """

    experts: mx.array  # uint32 [M, top_k], by falling logit
    scores: mx.array  # float32 [M, top_k + 1], the last one is the shared expert's
    offsets: mx.array  # uint32 [E + 1], expert e owns the sorted rows offsets[e] to offsets[e + 1]
    row_tokens: mx.array  # uint32 [S], token of each sorted row
    slot_rows: mx.array  # uint32 [M, top_k], sorted row of each pair
    blocks: mx.array  # uint32 [capacity, 4]: expert (E: the shared one), first row, rows (0: unused), 0
    tile_rows: int  # most rows of a block

    @property
    def tokens(self) -> int:
        """M, tokens of the chunk."""
        return int(self.experts.shape[0])

    @property
    def top_k(self) -> int:
        """Routed experts of each token."""
        return int(self.experts.shape[1])

    @property
    def rows(self) -> int:
        """S + M, rows of the grouped arrays."""
        return self.tokens * (self.top_k + 1)


def route(logits: mx.array, top_k: int, normalise: bool, tile_rows: int | None = None) -> Routing:
    """Chooses the experts of each token and groups the tokens by expert, all on the device.

    Args:
        logits: float32 [M, E + 1], the router's logits and, last, the shared expert's gate. NaN ranks with
            minus infinity; among equal logits the higher expert id wins.
        top_k: routed experts per token (config ``num_experts_per_tok``).
        normalise: softmax over the chosen experts instead of over all (config ``norm_topk_prob``).
        tile_rows: most rows of a block, one of 8, 16, 32, 48, 64, 96, 128; None: by the average rows per expert.

    Raises:
        ValueError: wrong shape or dtype, top_k or expert count out of range.
    """
    experts_count = check_logits(logits, top_k)
    tokens = logits.shape[0]
    pairs = tokens * top_k
    if tokens < 1 or pairs > MAX_PAIRS:
        raise ValueError(f"route: {tokens} rows with top_k {top_k}; give 1 to {MAX_PAIRS // top_k} rows, or chunk them")
    if tile_rows is None:
        tile_rows = policy.tile_height(tokens, top_k, experts_count)
    if tile_rows not in policy.TILE_HEIGHTS:
        raise ValueError(f"route: tile_rows is {tile_rows}; choose one of {policy.TILE_HEIGHTS}")
    if tokens <= policy.ONE_LAUNCH_ROWS and pairs <= policy.ONE_LAUNCH_PAIRS:
        return _route_rows(logits, experts_count, top_k, normalise, tile_rows)
    per_lane = -(-experts_count // 32)
    simdgroups = min(4, tokens)
    experts, scores = _SELECT(
        [logits],
        template={"E": experts_count, "TOP_K": top_k, "PER_LANE": per_lane, "NORMALISE": bool(normalise)},
        grid=(_ceil(tokens, simdgroups) * simdgroups * 32, 1, 1),
        threadgroup=(simdgroups * 32, 1, 1),
        output_shapes=[(tokens, top_k), (tokens, top_k + 1)],
        output_dtypes=[mx.uint32, mx.float32],
    )
    threads = policy.sort_threads(pairs)
    offsets, row_tokens, slot_rows = _SORT(
        [experts],
        grid=(threads * experts_count, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(experts_count + 1,), (pairs,), (tokens, top_k)],
        output_dtypes=[mx.uint32, mx.uint32, mx.uint32],
    )
    capacity = block_capacity(tokens, top_k, experts_count, tile_rows)
    threads = 32 * per_lane
    (blocks,) = _MAP(
        [experts, offsets],
        template={"TILE_ROWS": tile_rows},
        grid=(_ceil(capacity, threads) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(capacity, 4)],
        output_dtypes=[mx.uint32],
    )
    return Routing(experts, scores, offsets, row_tokens, slot_rows, blocks, tile_rows)


def _route_rows(logits: mx.array, experts_count: int, top_k: int, normalise: bool, tile_rows: int) -> Routing:
    tokens, per_lane = logits.shape[0], -(-experts_count // 32)
    simdgroups = max(per_lane, min(tokens, 16))
    experts, scores, offsets, row_tokens, slot_rows, blocks = _ROUTE_ROWS(
        [logits],
        template={
            "E": experts_count,
            "TOP_K": top_k,
            "PER_LANE": per_lane,
            "NORMALISE": bool(normalise),
            "TILE_ROWS": tile_rows,
            "ROWS": min(policy.ONE_LAUNCH_ROWS, policy.ONE_LAUNCH_PAIRS // top_k),
            "SIMDGROUPS": simdgroups,
        },
        grid=(32 * simdgroups, 1, 1),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[
            (tokens, top_k),
            (tokens, top_k + 1),
            (experts_count + 1,),
            (tokens * top_k,),
            (tokens, top_k),
            (block_capacity(tokens, top_k, experts_count, tile_rows), 4),
        ],
        output_dtypes=[mx.uint32, mx.float32, *[mx.uint32] * 4],
    )
    return Routing(experts, scores, offsets, row_tokens, slot_rows, blocks, tile_rows)


def block_capacity(tokens: int, top_k: int, experts: int, tile_rows: int) -> int:
    """Blocks that any routing fits in: the shared expert's, the routed experts', a partial one for each."""
    pairs = tokens * top_k
    return _ceil(tokens, tile_rows) + _ceil(pairs, tile_rows) + min(experts, pairs)


def check_logits(logits: mx.array, top_k: int) -> int:
    """Checks the router's logits [M, E + 1] and ``top_k``; returns E."""
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(f"logits have shape {logits.shape}; expected [rows, experts + 1]")
    if logits.dtype != mx.float32:
        raise ValueError(f"logits are {logits.dtype}; the router's logits must be float32")
    experts = int(logits.shape[1]) - 1
    if experts > MAX_EXPERTS:
        raise ValueError(f"{experts} experts; at most {MAX_EXPERTS} are supported")
    if not 1 <= top_k <= min(experts, MAX_TOP_K):
        raise ValueError(f"top_k is {top_k} with {experts} experts; choose 1 to {min(experts, MAX_TOP_K)}")
    return experts


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
