// matmul for up to TOKENS rows, with weights that go from memory to registers only (direct.h):
//   out[m, n] = (residual[m, n] +) sum_k x[m, k] * bfloat16(weight[n, k]), x [M, K], weight [N, K].
// Grid: tiles of 16 * BANDS * SIMD_N columns of N. A threadgroup has SIMD_N * SIMD_K
// simdgroups: SIMD_K of them share 16 * BANDS weight rows, each for a part of every DEPTH columns of K.
// Bytes: the weight once, x from cache, out once.
constexpr int THREADS = 32 * SIMD_N * SIMD_K;
constexpr int BN = 16 * BANDS * SIMD_N;
constexpr int X_PIECES = TOKENS * (DEPTH + 8) / 8;
constexpr int SUM_PIECES = (SIMD_K * BN * (TOKENS + 1) + 3) / 4;
threadgroup uint4 shared_memory[X_PIECES > SUM_PIECES ? X_PIECES : SUM_PIECES];
threadgroup uint x_rows[TOKENS];
const uint lane = thread_index_in_simdgroup;
const int thread_id = int(thread_index_in_threadgroup);
const int simd_group = int(simdgroup_index_in_threadgroup);
const int height = int(x_shape[0]);
if (thread_id < TOKENS) {
  x_rows[thread_id] = uint(metal::min(thread_id, height - 1));
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const int first_column = int(threadgroup_position_in_grid.x) * BN;
Tile<16 * BANDS, TOKENS> acc;
acc.clear();
DirectBand bands[BANDS];
for (int b = 0; b < BANDS; ++b) {
  bands[b].first = first_column + 16 * (BANDS * (simd_group % SIMD_N) + b);
  bands[b].weight = weight;
  bands[b].scales = scales_of<BITS, GROUP, K>(weight, N);
  bands[b].biases = biases_of<BITS, GROUP, K>(weight, N);
}
direct_product<BITS, GROUP, K, BANDS, TOKENS, DEPTH, SIMD_K, AHEAD, THREADS>(
    acc, (threadgroup bfloat*)shared_memory, x, x_rows, height, bands, N, simd_group / SIMD_N, lane, thread_id);

threadgroup float* sums = (threadgroup float*)shared_memory;
threadgroup_barrier(mem_flags::mem_threadgroup);
direct_store<BANDS, TOKENS>(sums + simd_group * 16 * BANDS * (TOKENS + 1), acc, lane);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = thread_id; i < height * BN; i += THREADS) {
  const int row = i / BN;
  const int column = i % BN;
  if (first_column + column < N) {
    const size_t index = size_t(row) * size_t(N) + size_t(first_column + column);
    float value = 0.0f;
    for (int s = 0; s < SIMD_K; ++s) {
      value += sums[(s * BN + column) * (TOKENS + 1) + row];
    }
    if (HAS_RESIDUAL) {
      value += float(residual[index]);
    }
    out[index] = static_cast<T>(value);
  }
}
