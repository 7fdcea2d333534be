// out[m, n] = (residual[m, n] +) sum_k x[m, k] * bfloat16(weight[n, k]), x [M, K], weight [N, K].
//
// Grid: (ceil(N / BN), ceil(M / BM)) threadgroups of SIMD_M * SIMD_N * SIMD_K simdgroups. A threadgroup owns a BM x BN
// tile of out and each simdgroup a TM x TN part of it; SIMD_K simdgroups share a part, each for a slice of every BK
// columns. The threads have read the next AHEAD times BK columns of x and of the weight while the last are multiplied.
// Bytes: the weight ceil(M / BM) times, x ceil(N / BN) times (mostly from cache), out once.
constexpr int THREADS = 32 * SIMD_M * SIMD_N * SIMD_K;
constexpr int STRIDE = BK + 8; // 16 bytes of padding spread the rows over the banks
constexpr int TM = BM / SIMD_M;
constexpr int TN = BN / SIMD_N;
constexpr int TK = BK / SIMD_K;
static_assert(SIMD_K == 1 || ENGINE_SLICES_DEPTH, "this engine takes no slices of K");
constexpr int PARTIAL = (SIMD_K - 1) * BM * BN / 4; // the other slices' sums, in 16 bytes
constexpr int OPERANDS = (BM + BN) * STRIDE / 8;
threadgroup uint4 shared_memory[OPERANDS > PARTIAL ? OPERANDS : PARTIAL];
const uint lane = thread_index_in_simdgroup;
const int simd_group = int(simdgroup_index_in_threadgroup);
const int thread_id = int(thread_index_in_threadgroup);
const int height = int(x_shape[0]);
const int first_m = int(threadgroup_position_in_grid.y) * BM;
const int first_n = int(threadgroup_position_in_grid.x) * BN;
const int tile_m = simd_group % SIMD_M * TM;
const int tile_n = simd_group / SIMD_M % SIMD_N * TN;
const int slice = simd_group / (SIMD_M * SIMD_N);
threadgroup bfloat* x_tile = (threadgroup bfloat*)shared_memory;
threadgroup bfloat* weight_tile = x_tile + BM * STRIDE;
const device bfloat* x_rows = x + size_t(first_m) * K;
const device uint* weight_rows = weight + size_t(first_n) * (K / UNIT * BITS);
const device bfloat* scale_rows = scales_of<BITS, GROUP, K>(weight, N) + size_t(first_n) * (K / GROUP);
const device bfloat* bias_rows = biases_of<BITS, GROUP, K>(weight, N) + size_t(first_n) * (K / GROUP);

RowPieces<LILY_SHARE(BM * BK / 8, THREADS), AHEAD> pieces;
WeightUnits<BITS, LILY_SHARE(BN * BK / UNIT, THREADS)> units[AHEAD];
locate_rows<BM, BK, K, THREADS>(pieces, height - first_m, thread_id);
#pragma unroll
for (int i = 0; i < AHEAD; ++i) {
  read_rows(pieces, x_rows, i * BK, i);
  read_units<BITS, GROUP, K, BN, BK, THREADS>(
      units[i], weight_rows, scale_rows, bias_rows, N - first_n, i * BK, thread_id);
}

LILY_ACCUMULATOR(acc, TM, TN, TK);
accumulator_clear(acc);
for (int start = 0; start < K; start += AHEAD * BK) {
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_rows<BM, BK, STRIDE, THREADS>(x_tile, pieces, i, thread_id);
    store_units<BITS, BN, BK, STRIDE, THREADS>(weight_tile, units[i], thread_id);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (start + AHEAD * BK < K) {
      const int column = start + (AHEAD + i) * BK;
      read_rows(pieces, x_rows, column, i);
      read_units<BITS, GROUP, K, BN, BK, THREADS>(
          units[i], weight_rows, scale_rows, bias_rows, N - first_n, column, thread_id);
    }
    tile_multiply_transposed<TM, TN, TK>(
        acc, x_tile + tile_m * STRIDE + slice * TK, STRIDE, weight_tile + tile_n * STRIDE + slice * TK, STRIDE);
  }
}

if (SIMD_K > 1) {
  threadgroup float* partial = (threadgroup float*)shared_memory;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (slice > 0) {
#pragma unroll
    for (int i = 0; i < accumulator_size(acc); ++i) {
      partial[((slice - 1) * SIMD_M * SIMD_N + simd_group % (SIMD_M * SIMD_N)) * TM * TN + 32 * i + int(lane)] =
          accumulator_get(acc, i);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (slice == 0) {
    for (int s = 0; s < SIMD_K - 1; ++s) {
#pragma unroll
      for (int i = 0; i < accumulator_size(acc); ++i) {
        accumulator_set(
            acc, i,
            accumulator_get(acc, i) + partial[(s * SIMD_M * SIMD_N + simd_group) * TM * TN + 32 * i + int(lane)]);
      }
    }
  }
}
if (slice == 0) {
#pragma unroll
  for (int i = 0; i < accumulator_size(acc); ++i) {
    const int m = first_m + tile_m + accumulator_row(acc, i, lane);
    const int n = first_n + tile_n + accumulator_column(acc, i, lane);
    if (m < height && n < N) {
      const size_t index = size_t(m) * size_t(N) + size_t(n);
      float value = accumulator_get(acc, i);
      if (HAS_RESIDUAL) {
        value += float(residual[index]);
      }
      out[index] = static_cast<T>(value);
    }
  }
}
