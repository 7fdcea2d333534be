"""MLX's kernels along the last axis: softmax, sort and cumulative sum, launched as MLX's host code does."""

from __future__ import annotations

import mlx.core as mx

from .kernel import WheelKernel

_SOFTMAX_ROW = WheelKernel("softmax_single_row", "softmax.h")
_SOFTMAX_LOOPED = WheelKernel("softmax_looped", "softmax.h")
_BLOCK_SORT = WheelKernel("block_sort", "sort.h")
_SCAN = WheelKernel("contiguous_scan", "scan.h")

_READS = 4  # elements that a thread handles at a time
_LOOPED_ABOVE = 4096
_MAX_THREADS = 1024


def _rows(x: mx.array) -> tuple[int, int]:
    if x.ndim < 1 or x.size == 0:
        raise ValueError(f"shape {x.shape}: expected at least one row of at least one element")
    return x.size // x.shape[-1], x.shape[-1]


def softmax(x: mx.array) -> mx.array:
    """`mx.softmax(x, axis=-1, precise=True)` for any float dtype."""
    rows, length = _rows(x)
    looped = length > _LOOPED_ABOVE
    threads = _MAX_THREADS if looped else -(-length // (_READS * 32)) * 32
    return (_SOFTMAX_LOOPED if looped else _SOFTMAX_ROW)(
        {"in": x},
        {"axis_size": length},
        {"out": (x.shape, x.dtype)},
        template={"T": x.dtype, "AccT": mx.float32, "N_READS": _READS},
        threadgroups=(rows, 1, 1),
        threadgroup=(threads, 1, 1),
    )[0]


def sort(x: mx.array, indices: bool = False) -> mx.array:
    """`mx.sort(x)` or `mx.argsort(x)` (uint32) along the last axis, at most 2,048 elements.

    MLX sorts longer rows in several launches, which are not wrapped here.
    """
    rows, length = _rows(x)
    per_thread = 4
    threads = next((n for n in (32, 64, 128, 256, 512) if n * per_thread >= length), 0)
    if not threads or (threads == 512 and x.itemsize > 4):
        raise ValueError(f"rows of {length} elements of {x.dtype} do not fit one threadgroup")
    dtype = mx.uint32 if indices else x.dtype
    return _BLOCK_SORT(
        {"inp": x},
        {
            "size_sorted_axis": length,
            "in_stride_sorted_axis": 1,
            "out_stride_sorted_axis": 1,
            "in_stride_segment_axis": length,
            "out_stride_segment_axis": length,
        },
        {"out": (x.shape, dtype)},
        template={
            "T": x.dtype,
            "U": dtype,
            "ARG_SORT": indices,
            "BLOCK_THREADS": threads,
            "N_PER_THREAD": per_thread,
        },
        threadgroups=(1, rows, 1),
        threadgroup=(threads, 1, 1),
    )[0]


def cumulative_sum(x: mx.array, reverse: bool = False, inclusive: bool = True) -> mx.array:
    """`mx.cumsum(x, axis=-1)` for numbers of at most 4 bytes."""
    rows, length = _rows(x)
    if x.itemsize > 4:
        raise ValueError(f"dtype {x.dtype}: expected at most 4 bytes")
    threads = _MAX_THREADS
    if length <= _READS * 1024:
        threads = -(-length // (_READS * 32)) * 32
    elif length <= _READS * 2048:
        threads = -(-(length // 2) // (_READS * 32)) * 32
    return _SCAN(
        {"in": x},
        {"axis_size": length},
        {"out": (x.shape, x.dtype)},
        template={"T": x.dtype, "U": x.dtype, "N_READS": _READS, "inclusive": inclusive, "reverse": reverse},
        types={"Op": "CumSum<U>"},
        threadgroups=(1, rows, 1),
        threadgroup=(threads, 1, 1),
    )[0]
