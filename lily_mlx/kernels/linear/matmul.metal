// out[m, n] = (residual[m, n] +) sum_k x[m, k] * bfloat16(weight[n, k]), x [M, K], weight [N, K].
//
// Grid: (ceil(N / BN), ceil(M / BM)) threadgroups of 4 simdgroups; a threadgroup owns a BM x BN tile of out,
// and each simdgroup a part of it: SIMDGROUP_ROWS stand above each other, the others beside them.
// BK columns at a time, the threads copy x and dequantise the weight into threadgroup memory.
// Bytes: the weight ceil(M / BM) times, x ceil(N / BN) times (mostly from cache), out once.
constexpr int STRIDE = BK + 8; // 16 bytes of padding spread the rows over the banks
constexpr int TM = BM / SIMDGROUP_ROWS;
constexpr int TN = BN * SIMDGROUP_ROWS / 4;
threadgroup uint4 x_tile[BM * STRIDE / 8];
threadgroup uint4 weight_tile[BN * STRIDE / 8];
const uint lane = thread_index_in_simdgroup;
const int thread_id = int(thread_index_in_threadgroup);
const int height = int(x_shape[0]);
const int width = int(weight_shape[0]);
const int first_m = int(threadgroup_position_in_grid.y) * BM;
const int first_n = int(threadgroup_position_in_grid.x) * BN;
const int tile_m = int(simdgroup_index_in_threadgroup) / (4 / SIMDGROUP_ROWS) * TM;
const int tile_n = int(simdgroup_index_in_threadgroup) % (4 / SIMDGROUP_ROWS) * TN;
threadgroup bfloat* x_values = (threadgroup bfloat*)x_tile;
threadgroup bfloat* weight_values = (threadgroup bfloat*)weight_tile;
const device bfloat* x_rows = x + size_t(first_m) * K;
const device uint* weight_rows = weight + size_t(first_n) * (K / UNIT * BITS);
const device bfloat* scale_rows = scales + size_t(first_n) * (K / GROUP);
const device bfloat* bias_rows = biases + size_t(first_n) * (K / GROUP);

Tile<TM, TN> acc;
acc.clear();
for (int column = 0; column < K; column += BK) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  load_tile<BM, BK, 128>(x_values, STRIDE, x_rows, K, height - first_m, column, thread_id);
  dequantize_tile<BITS, GROUP, K, BN, BK, 128>(
      weight_values, STRIDE, weight_rows, scale_rows, bias_rows, width - first_n, column, thread_id);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  tile_multiply_transposed<TM, TN, BK>(
      acc, x_values + tile_m * STRIDE, STRIDE, weight_values + tile_n * STRIDE, STRIDE);
}

#pragma unroll
for (int i = 0; i < Tile<TM, TN>::ELEMENTS; ++i) {
  const int m = first_m + tile_m + Tile<TM, TN>::row(i, lane);
  const int n = first_n + tile_n + Tile<TM, TN>::column(i, lane);
  if (m < height && n < width) {
    const size_t index = size_t(m) * size_t(width) + size_t(n);
    float value = acc.get(i);
    if (HAS_RESIDUAL) {
      value += float(residual[index]);
    }
    out[index] = static_cast<T>(value);
  }
}
