"""MLX's attention for few queries (`sdpa_vector.h`), launched as MLX's host code does on Apple GPUs."""

from __future__ import annotations

import mlx.core as mx

from .kernel import WheelKernel

_SDPA_VECTOR = WheelKernel("sdpa_vector", "sdpa_vector.h")
_FIRST_PASS = WheelKernel("sdpa_vector_2pass_1", "sdpa_vector.h")
_FIRST_PASS_GROUPED = WheelKernel("sdpa_vector_2pass_1_gqa", "sdpa_vector.h")
_SECOND_PASS = WheelKernel("sdpa_vector_2pass_2", "sdpa_vector.h")

# Where MLX has a first pass whose simdgroups read a key for several query heads: how many, by head
# dimension and query heads per KV head.
_SHARED_HEADS = {(64, 8): 8, (128, 8): 4, (128, 12): 4, (128, 16): 2}
# The wrappers take neither masks nor sinks.
_NO_MASKS = dict.fromkeys(("has_mask", "query_transposed", "bool_mask", "float_mask", "has_sinks"), False)


def two_passes(query_heads: int, kv_heads: int, length: int, gpu: str = "s") -> bool:
    """Whether MLX splits the keys over threadgroups.

    Args:
        gpu: last letter of the GPU's architecture: "g" (M1, M2...), "s" (Max), "d" (Ultra).
    """
    return (gpu in "sd" and length >= 1024) or (kv_heads < query_heads and length >= 4096)


def split_count(simdgroups: int, length: int, gpu: str = "s") -> int:
    """How many parts MLX makes of the keys, for `simdgroups` = queries times query heads per KV head."""
    if gpu == "s":
        if length <= 1024 or simdgroups <= 4:
            return 64
        return next((blocks for limit, blocks in ((8192, 128), (32768, 256), (65536, 512)) if length <= limit), 1024)
    if gpu == "d":
        if simdgroups <= 2:
            return 256 if length > 8192 else 128
        if simdgroups >= 6 and length >= 16384:
            return 512 if length < 65536 else 1024
        return 128
    return 64 if simdgroups >= 4 else 32


def decode_attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, length: int | None = None, gpu: str = "s"
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention` for few queries, by the kernels that MLX picks."""
    keys = k.shape[2] if length is None else length
    if two_passes(q.shape[1], k.shape[1], keys, gpu):
        return sdpa_vector_2pass(q, k, v, scale, length, gpu=gpu)
    return sdpa_vector(q, k, v, scale, length)


def _check(q: mx.array, k: mx.array, v: mx.array, length: int | None) -> int:
    """Checks the shapes; returns the number of keys."""
    keys = k.shape[2] if length is None else length
    if q.ndim != 4 or k.shape != (*k.shape[:2], *v.shape[2:]) or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}: expected [B, Hq, L, D] and twice [B, Hkv, N, D]")
    if q.shape[3] % 32 or q.shape[2] > 8 or not q.shape[2] <= keys <= k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} queries of {q.shape[3]} values and {keys} keys in {k.shape[2]} rows: the kernel takes at "
            "most 8 queries, head dimensions that are multiples of 32, and no fewer keys than queries"
        )
    return keys


def _strides(k: mx.array, v: mx.array) -> dict[str, int | float | None]:
    return {
        "k_head_stride": k.shape[2] * k.shape[3],
        "k_seq_stride": k.shape[3],
        "v_head_stride": v.shape[2] * v.shape[3],
        "v_seq_stride": v.shape[3],
    }


def sdpa_vector(q: mx.array, k: mx.array, v: mx.array, scale: float, length: int | None = None) -> mx.array:
    """softmax(scale * q k^T) v in one pass: one threadgroup for each query and head.

    Args:
        q: [B, Hq, L, D] with L <= 8; for L > 1 the mask is causal.
        k, v: [B, Hkv, N, D], Hq a multiple of Hkv.
        length: the keys in use, the first of each head; all N if None.

    Returns:
        [B, Hq, L, D] of q's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    keys = _check(q, k, v, length)
    batch, heads, queries, dim = q.shape
    numbers = {"gqa_factor": heads // k.shape[1], "N": keys, "scale": scale, **_strides(k, v)}
    return _SDPA_VECTOR(
        {"queries": q, "keys": k, "values": v},
        numbers,
        {"out": (q.shape, q.dtype)},
        template={"T": q.dtype, "D": dim},
        constants={**_NO_MASKS, "do_causal": queries > 1},
        threadgroups=(batch * heads, queries, 1),
        threadgroup=(1024, 1, 1),
    )[0]


def sdpa_vector_2pass(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    length: int | None = None,
    blocks: int | None = None,
    gpu: str = "s",
) -> mx.array:
    """The same in two kernels: parts of the keys in parallel, then their combination.

    Args:
        blocks: number of parts, a multiple of 32; MLX's choice for `gpu` if None.
    """
    keys = _check(q, k, v, length)
    batch, heads, queries, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    blocks = blocks or split_count(group * queries, keys, gpu)
    if blocks % 32:
        raise ValueError(f"blocks={blocks} must be a multiple of 32")
    if group * queries > 32:
        raise ValueError(f"{queries} queries times {group} query heads per KV head; the kernel takes at most 32")
    shared_heads = _SHARED_HEADS.get((dim, group)) if queries == 1 and keys >= 8192 else None
    template: dict[str, int | bool | mx.Dtype] = {"T": q.dtype, "D": dim}
    constants: dict[str, int | bool] = {**_NO_MASKS, "do_causal": queries > 1, "blocks": blocks}
    if shared_heads:
        template |= {"V": dim, "G": group, "HPT": shared_heads}
        constants = {}
    partials, sums, maxima = (_FIRST_PASS_GROUPED if shared_heads else _FIRST_PASS)(
        {"queries": q, "keys": k, "values": v},
        {"N": keys, "scale": scale, **_strides(k, v)},
        {
            "out": ((batch, heads, queries, blocks, dim), q.dtype),
            "sums": ((batch, heads, queries, blocks), mx.float32),
            "maxs": ((batch, heads, queries, blocks), mx.float32),
        },
        template=template,
        constants=constants,
        threadgroups=(kv_heads, batch, blocks),
        threadgroup=(32, group, queries),
    )
    return _SECOND_PASS(
        {"partials": partials, "sums": sums, "maxs": maxima},
        {"blocks": blocks},
        {"out": (q.shape, q.dtype)},
        template={"T": q.dtype, "D": dim},
        threadgroups=(batch * heads, queries, 1),
        threadgroup=(1024, 1, 1),
    )[0]
