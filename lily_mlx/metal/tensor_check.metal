// out[M, N] = 2 A[M, K] B[N, K]^T of one simdgroup: what tensor_engine.h is checked with before kernels use it.
constexpr int STRIDE = K + 8;
threadgroup uint4 a_pieces[M * STRIDE / 8];
threadgroup uint4 b_pieces[N * STRIDE / 8];
const uint lane = thread_index_in_simdgroup;
threadgroup bfloat* a_tile = (threadgroup bfloat*)a_pieces;
threadgroup bfloat* b_tile = (threadgroup bfloat*)b_pieces;
for (int i = int(lane); i < M * K; i += 32) {
  a_tile[i / K * STRIDE + i % K] = a[i];
}
for (int i = int(lane); i < N * K; i += 32) {
  b_tile[i / K * STRIDE + i % K] = b[i];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
LILY_ACCUMULATOR(acc, M, N, K);
accumulator_clear(acc);
tile_multiply_transposed<M, N, K>(acc, a_tile, STRIDE, b_tile, STRIDE);
tile_multiply_transposed<M, N, K>(acc, a_tile, STRIDE, b_tile, STRIDE);
#pragma unroll
for (int i = 0; i < accumulator_size(acc); ++i) {
  const int row = accumulator_row(acc, i, lane);
  if (row < M) {
    out[row * N + accumulator_column(acc, i, lane)] = accumulator_get(acc, i);
  }
}
