"""All mechanisms of the article, with its figures for an M5 Max with 40 GPU cores."""

from __future__ import annotations

from .attention import fixed_part_count, own_attention, uncoalesced_reads, unpacked_heads
from .dequantisation import own_matmul, separate_dequantisation
from .fusion import unfused_delta, unfused_down, unfused_gate_up, unfused_query_key
from .pair import Pair
from .scan import BLOCK_ROWS, blocked_scan
from .scheduling import HostTokenArm, WholePromptArm, fixed_tile, host_routing, serial_launches
from .speculation import Speculation

Mechanism = Pair | Speculation

MECHANISMS: tuple[Mechanism, ...] = (
    Pair(
        "dequantisation-in-the-matmul",
        "a launch that expands all experts to bfloat16 in memory, then a matmul that reads them",
        "prefill",
        {512: 0.774},
        separate_dequantisation,
        control=own_matmul,
    ),
    Pair(
        "routing-on-the-device",
        "the host reads the rows of each expert before it submits a layer's expert matmuls",
        "prefill",
        {512: 0.89},
        host_routing,
    ),
    Pair("tile-by-expert-load", "blocks of 16 rows", "prefill", {2048: 0.132}, fixed_tile),
    Pair(
        "register-resident-scan",
        "launches of 64 rows, with the state in memory between them",
        "prefill",
        {2048: 0.056},
        blocked_scan,
        least_length=lambda run: BLOCK_ROWS + 1,
    ),
    Pair(
        "prompt-chunks",
        "the whole prompt at once",
        "prefill",
        {8192: None},
        arm=WholePromptArm,
        least_length=lambda run: run.chunk_size + 1,
    ),
    Pair(
        "independent-launches",
        "each launch is ordered after the one before it",
        "decode",
        {3840: None},
        serial_launches,
    ),
    Pair(
        "token-on-the-device",
        "the host reads each token and feeds it again, without look-ahead",
        "decode",
        {3840: None},
        arm=HostTokenArm,
    ),
    Pair(
        "fused-gate-up",
        "gate projection, up projection and activation as three launches",
        "decode",
        {3840: None},
        unfused_gate_up,
    ),
    Pair(
        "fused-down", "output projections and their weighted sum as two launches", "decode", {3840: None}, unfused_down
    ),
    Pair(
        "fused-query-key",
        "norm, rotation and cache update of q, k and v as six of MLX's operations",
        "decode",
        {3840: None},
        unfused_query_key,
        control=own_attention,
    ),
    Pair(
        "fused-delta",
        "convolution, normalisation and gates in one launch, the delta rule in another",
        "decode",
        {3840: None},
        unfused_delta,
    ),
    Pair(
        "coalesced-reads",
        "lanes load keys and values one by one, 16 bytes apart",
        "decode",
        {3840: 0.021},
        uncoalesced_reads,
        control=own_attention,
    ),
    Pair(
        "packed-query-heads",
        "each query head reads the rows of its KV head for itself",
        "decode",
        {32768: 0.238},
        unpacked_heads,
        control=own_attention,
    ),
    Pair(
        "growing-parts",
        "64 parts of the cache at any length",
        "decode",
        {32768: 0.077, 65536: 0.274, 131072: 0.402},
        fixed_part_count,
        control=own_attention,
    ),
    Speculation(article={3840: None}),
)


def named(names: list[str] | None) -> list[Mechanism]:
    """The mechanisms of these names, in the article's order; all of them without names.

    Raises:
        SystemExit: a name that no mechanism has.
    """
    known = {m.name: m for m in MECHANISMS}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise SystemExit(f"--mechanisms {' '.join(unknown)}: choose from {', '.join(known)}")
    return [m for m in MECHANISMS if names is None or m.name in names]
