"""The shared headers that no linear kernel covers fully: reductions and both tile products."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import lily_mlx
from lily_mlx.metal import Kernel
from tests.support import assert_close, bf16, rng, to_numpy

PACKAGE = Path(lily_mlx.__file__).parent


def header(*names):
    return "".join((PACKAGE / "metal" / "include" / name).read_text() for name in names)


REDUCE = Kernel.from_source(
    "reduce_check",
    ["x"],
    ["out"],
    header=header("reduce.h"),
    source="""
    threadgroup float scratch[SIMDGROUPS];
    const uint i = thread_index_in_threadgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    float total = threadgroup_sum<SIMDGROUPS>(x[i], scratch, group, lane);
    float largest = threadgroup_max<SIMDGROUPS>(x[i], scratch, group, lane);
    float again = threadgroup_sum<SIMDGROUPS>(x[i], scratch, group, lane);
    out[3 * i] = total;
    out[3 * i + 1] = largest;
    out[3 * i + 2] = again;
    """,
)

TILE = Kernel.from_source(
    "tile_check",
    ["a", "b"],
    ["out"],
    header=header("fragment.h", "tile.h"),
    source="""
    threadgroup uint4 a_tile[M * (K + 8) / 8];
    threadgroup uint4 b_tile[(TRANSPOSED ? N * (K + 8) : K * (N + 8)) / 8];
    threadgroup bfloat* a_values = (threadgroup bfloat*)a_tile;
    threadgroup bfloat* b_values = (threadgroup bfloat*)b_tile;
    const uint lane = thread_index_in_simdgroup;
    const int width = TRANSPOSED ? K : N;
    for (int i = int(lane); i < M * K; i += 32) {
      a_values[i / K * (K + 8) + i % K] = a[i];
    }
    for (int i = int(lane); i < K * N; i += 32) {
      b_values[i / width * (width + 8) + i % width] = b[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Tile<M, N> acc;
    acc.clear();
    for (int i = 0; i < Tile<M, N>::ELEMENTS; ++i) {
      acc.set(i, acc.get(i) + 1.0f);
    }
    if (TRANSPOSED) {
      tile_multiply_transposed<M, N, K>(acc, a_values, K + 8, b_values, width + 8);
    } else {
      tile_multiply<M, N, K>(acc, a_values, K + 8, b_values, width + 8);
    }
    for (int i = 0; i < Tile<M, N>::ELEMENTS; ++i) {
      out[Tile<M, N>::row(i, lane) * N + Tile<M, N>::column(i, lane)] = acc.get(i);
    }
    """,
)


@pytest.mark.parametrize("simdgroups", [1, 2, 7, 16])
def test_threadgroup_reductions(simdgroups):
    x = rng(simdgroups).standard_normal(32 * simdgroups).astype(np.float32)
    (out,) = REDUCE(
        [mx.array(x)],
        template={"SIMDGROUPS": simdgroups},
        grid=(x.size, 1, 1),
        threadgroup=(x.size, 1, 1),
        output_shapes=[(x.size, 3)],
        output_dtypes=[mx.float32],
    )
    total = x.astype(np.float64).sum()
    assert_close("every thread's results", out, np.tile([total, x.max(), total], (x.size, 1)), 1e-5)


@pytest.mark.parametrize("transposed", [True, False], ids=["B transposed", "B as it is"])
@pytest.mark.parametrize(("m", "n", "k"), [(8, 8, 8), (16, 8, 16), (16, 32, 64), (32, 32, 48), (8, 64, 32)], ids=str)
def test_tile_products(m, n, k, transposed):
    generator = rng(m * n * k)
    a, b = bf16(generator.standard_normal((m, k))), bf16(generator.standard_normal((k, n)))
    (out,) = TILE(
        [a, mx.contiguous(b.T) if transposed else b],
        template={"M": m, "N": n, "K": k, "TRANSPOSED": transposed},
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(m, n)],
        output_dtypes=[mx.float32],
    )
    assert_close("1 + A B", out, 1.0 + to_numpy(a) @ to_numpy(b), 1e-6)
