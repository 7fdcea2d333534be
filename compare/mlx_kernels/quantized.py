"""MLX's affine quantised products (`quantized.h`), launched as MLX's host code does on Apple GPUs.

Packing, groups and names are those of `mx.quantize`: w uint32 [..., N, K * bits / 32], scales and biases
[..., N, K / group_size] of x's dtype.
"""

from __future__ import annotations

import mlx.core as mx

from .kernel import WheelKernel, index_array

_NEEDS = ("steel/gemm/gemm.h", "quantized_utils.h")


def _kernel(name: str, uses_fragments: bool = False) -> WheelKernel:
    return WheelKernel(name, "quantized.h", _NEEDS, uses_fragments)


_QMV_QUAD = _kernel("affine_qmv_quad")
_QMV_FAST = _kernel("affine_qmv_fast")
_QMV = _kernel("affine_qmv")
_QMV_WIDE = _kernel("affine_qmv_wide")
_GATHER_QMV_FAST = _kernel("affine_gather_qmv_fast")
_GATHER_QMV = _kernel("affine_gather_qmv")
_QMM_T = _kernel("affine_qmm_t", uses_fragments=True)
_QMM_T_SPLIT = _kernel("affine_qmm_t_splitk", uses_fragments=True)
_GATHER_QMM_RHS = _kernel("affine_gather_qmm_rhs", uses_fragments=True)
_SEARCHSORTED = WheelKernel("searchsorted", "searchsorted.h", ("sort.h",))
_TILE = 32
_GOAL_THREADGROUPS = 512

# Arguments that only batched products read.
_NO_BATCH_ARRAYS = dict.fromkeys(("x_shape", "x_strides", "w_shape", "w_strides", "s_strides", "b_strides"))
_NO_BATCH_NUMBERS = dict.fromkeys(("x_batch_ndims", "w_batch_ndims"))


def _fast_columns(bits: int) -> int:
    """The columns that one step of a `qmv_fast` simdgroup covers: K must be a multiple."""
    values_per_word = 8 if bits in (3, 5) else 4 if bits == 6 else 32 // bits
    return values_per_word * (1 if bits == 2 else 2) * 32


def quantized_matvec(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    group_size: int = 64,
    bits: int = 4,
    wide: bool = True,
) -> mx.array:
    """x @ dequantised(w).T for a few rows.

    Args:
        x: [M, K], any float dtype.
        w, scales, biases: [N, ...].
        wide: for two rows or more use `affine_qmv_wide`, as MLX does from the M3 generation on.

    Returns:
        [M, N] of x's dtype.
    """
    rows, columns = x.shape
    out = w.shape[0]
    template: dict[str, int | bool | mx.Dtype] = {
        "T": x.dtype, "group_size": group_size, "bits": bits, "batched": False,
    }  # fmt: skip
    arrays = {"w": w, "scales": scales, "biases": biases, "x": x, **_NO_BATCH_ARRAYS}
    numbers = {"in_vec_size": columns, "out_vec_size": out, **_NO_BATCH_NUMBERS}
    outputs = {"y": ((rows, out), x.dtype)}
    if columns in (64, 128) and bits in (1, 2, 4, 8):
        return _QMV_QUAD(
            arrays, numbers, outputs, template={**template, "D": columns},
            threadgroups=(rows, -(-out // 64), 1), threadgroup=(32, 1, 1),
        )[0]  # fmt: skip
    if wide and rows >= 2:
        tiles = -(-rows // 5)
        vectors = -(-rows // tiles)
        return _QMV_WIDE(
            arrays, {**numbers, "M": rows}, outputs, template={**template, "vecs_per_tg": vectors, "k_lanes": 8},
            threadgroups=(-(-rows // vectors), -(-out // 8), 1), threadgroup=(32, 2, 1),
        )[0]  # fmt: skip
    fast = columns % _fast_columns(bits) == 0
    return (_QMV_FAST if fast else _QMV)(
        arrays, numbers, outputs, template={**template, **({"partial_rows": out % 8 != 0} if fast else {})},
        threadgroups=(rows, -(-out // 8), 1), threadgroup=(32, 2, 1),
    )[0]  # fmt: skip


def gather_quantized_matvec(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    expert_ids: mx.array,
    group_size: int = 64,
    bits: int = 4,
) -> mx.array:
    """Row r: x[r] @ dequantised(w[expert_ids[r]]).T, the product of decode's experts.

    Args:
        x: [1, K], the same row for all experts, or [R, K].
        w, scales, biases: [E, N, ...].
        expert_ids: uint32 [R].

    Returns:
        [R, N] of x's dtype.
    """
    rows, columns = x.shape
    experts, out, words = w.shape
    groups = scales.shape[-1]
    routes = expert_ids.size
    if rows not in (1, routes):
        raise ValueError(f"x has {rows} rows; expected 1 or {routes}, one for each expert id")
    kernel = _GATHER_QMV_FAST if out % 8 == 0 and columns % _fast_columns(bits) == 0 else _GATHER_QMV
    arrays = {
        "w": w,
        "scales": scales,
        "biases": biases,
        "x": x,
        "lhs_indices": index_array((0,) * routes if rows == 1 else tuple(range(routes)), mx.uint32),
        "rhs_indices": expert_ids,
        "x_shape": index_array((rows, 1, columns)),
        "x_strides": index_array((columns, columns, 1), mx.int64),
        "w_shape": index_array((experts, out, words)),
        "w_strides": index_array((out * words, words, 1), mx.int64),
        "s_strides": index_array((out * groups, groups, 1), mx.int64),
        "b_strides": index_array((out * groups, groups, 1), mx.int64),
        "batch_shape": index_array((routes,)),
        "lhs_strides": index_array((1,), mx.int64),
        "rhs_strides": index_array((1,), mx.int64),
    }
    numbers = {
        "in_vec_size": columns,
        "out_vec_size": out,
        "x_batch_ndims": 1,
        "w_batch_ndims": 1,
        "batch_ndims": 1,
    }
    return kernel(
        arrays,
        numbers,
        {"y": ((routes, out), x.dtype)},
        template={"T": x.dtype, "group_size": group_size, "bits": bits},
        threadgroups=(1, -(-out // 8), routes),
        threadgroup=(32, 2, 1),
    )[0]


def split_count(rows: int, columns: int, out: int, group_size: int) -> int:
    """How many parts MLX makes of K so that a small product fills the GPU."""
    unit = max(group_size, _TILE)
    parts = max(1, _GOAL_THREADGROUPS // (-(-out // _TILE) * -(-rows // _TILE)))
    parts = min(parts, columns // unit)
    while parts > 1 and columns % (parts * unit):
        parts -= 1
    return max(parts, 1)


def quantized_matmul(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int = 64, bits: int = 4
) -> mx.array:
    """x @ dequantised(w).T for many rows, with `simdgroup_matrix` and tiles of 32 x 32.

    Args:
        x: [M, K], K a multiple of 32.
        w, scales, biases: [N, ...].

    Returns:
        [M, N] of x's dtype. Products with few tiles are split along K and summed by `mx.sum` (MLX sums them
        by a kernel that its headers do not have).
    """
    rows, columns = x.shape
    out = w.shape[0]
    tiles = (-(-out // _TILE), -(-rows // _TILE))
    template: dict[str, int | bool | mx.Dtype] = {
        "T": x.dtype, "group_size": group_size, "bits": bits, "aligned_N": out % _TILE == 0,
    }  # fmt: skip
    arrays = {"w": w, "scales": scales, "biases": biases, "x": x}
    numbers = {"K": columns, "N": out, "M": rows}
    parts = split_count(rows, columns, out, group_size)
    if parts > 1:
        (partial,) = _QMM_T_SPLIT(
            arrays,
            {**numbers, "k_partition_size": columns // parts, "split_k_partition_stride": rows * out},
            {"y": ((parts, rows, out), mx.float32)},
            template=template,
            threadgroups=(*tiles, parts),
            threadgroup=(32, 2, 2),
        )
        return partial.sum(axis=0).astype(x.dtype)
    return _QMM_T(
        {**arrays, **_NO_BATCH_ARRAYS},
        {**numbers, **_NO_BATCH_NUMBERS},
        {"y": ((rows, out), x.dtype)},
        template={**template, "batched": False},
        threadgroups=(*tiles, 1),
        threadgroup=(32, 2, 2),
    )[0]


def group_offsets(expert_of_row: mx.array, experts: int) -> mx.array:
    """The first row of each expert: int32 [experts], for ascending `expert_of_row` (uint32 [M])."""
    (offsets,) = _SEARCHSORTED(
        {"a": expert_of_row, "v": index_array(tuple(range(experts)), mx.uint32)},
        {"n": expert_of_row.size, "a_stride": 1},
        {"out": ((experts,), mx.uint32)},
        template={"T": mx.uint32, "Right": False},
        threadgroups=(experts, 1, 1),
        threadgroup=(1, 1, 1),
    )
    return offsets.view(mx.int32)


def gather_quantized_matmul_sorted(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    expert_of_row: mx.array,
    group_size: int = 64,
    bits: int = 4,
) -> mx.array:
    """Row r: x[r] @ dequantised(w[expert_of_row[r]]).T for rows sorted by expert, tiles of 16 x 32.

    Args:
        x: [M, K].
        w, scales, biases: [E, N, ...].
        expert_of_row: uint32 [M], ascending.

    Returns:
        [M, N] of x's dtype.
    """
    rows, columns = x.shape
    experts, out, _ = w.shape
    if expert_of_row.shape != (rows,):
        raise ValueError(f"expert_of_row has shape {expert_of_row.shape}; expected ({rows},), one for each row")
    tile_rows = 16
    return _GATHER_QMM_RHS(
        {
            "x": x,
            "w": w,
            "scales": scales,
            "biases": biases,
            "offsets": group_offsets(expert_of_row, experts),
        },
        {"M": rows, "N": out, "K": columns, "num_groups": experts},
        {"y": ((rows, out), x.dtype)},
        template={
            "T": x.dtype,
            "group_size": group_size,
            "bits": bits,
            "BM": tile_rows,
            "BN": 32,
            "BK": 32,
            "WM": 1,
            "WN": 2,
            "transpose": True,
        },
        constants={"align_N": out % 32 == 0, "align_K": columns % 32 == 0},
        threadgroups=(-(-out // 32), min(rows, -(-rows // tile_rows) + experts - 1), 1),
        threadgroup=(32, 2, 1),
    )[0]
