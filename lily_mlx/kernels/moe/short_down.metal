// Prefill, blocks of few rows: grouped_down, with weights that go from memory to registers only (direct.h).
//   out[r, h] = bfloat(dot(down[e, h], hidden[r]))
// for the rows r of each block (e, first row, count) of the block map; e = E is the shared expert. Weights are rounded to
// bfloat after dequantisation; products add in float32.
// Grid: (tiles of 16 * BANDS * SIMD_N columns of H, blocks of up to TOKENS rows). A threadgroup has SIMD_N * SIMD_K
// simdgroups: SIMD_K of them share 16 * BANDS weight rows, each for a part of every DEPTH columns of K. Unused blocks
// leave at once.
// Bytes: the block's weight rows once, 2 TOKENS I of hidden from cache, then 2 bytes per row and column written.
constexpr int THREADS = 32 * SIMD_N * SIMD_K;
constexpr size_t ROUTED_ROWS = size_t(E) * H;
constexpr int BN = 16 * BANDS * SIMD_N;
constexpr int X_PIECES = TOKENS * (DEPTH + 8) / 8;
constexpr int SUM_PIECES = (SIMD_K * BN * (TOKENS + 1) + 3) / 4;
threadgroup uint4 shared_memory[X_PIECES > SUM_PIECES ? X_PIECES : SUM_PIECES];
threadgroup uint x_rows[TOKENS];
const uint lane = thread_index_in_simdgroup;
const int thread_id = int(thread_index_in_threadgroup);
const int simd_group = int(simdgroup_index_in_threadgroup);
const uint block = threadgroup_position_in_grid.y;
const uint expert = blocks[4u * block];
const uint first_row = blocks[4u * block + 1u];
const int rows_valid = int(blocks[4u * block + 2u]);
if (rows_valid > 0) {
  if (thread_id < TOKENS) {
    x_rows[thread_id] = first_row + uint(metal::min(thread_id, rows_valid - 1));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int first_column = int(threadgroup_position_in_grid.x) * BN;
  const int slice = simd_group / SIMD_N;
  threadgroup bfloat* tile = (threadgroup bfloat*)shared_memory;
  Tile<16 * BANDS, TOKENS> acc;
  acc.clear();
  DirectBand bands[BANDS];
  if (expert < uint(E)) {
    const size_t group = expert_groups<H, I, GROUP>(expert);
    for (int b = 0; b < BANDS; ++b) {
      bands[b].first = first_column + 16 * (BANDS * (simd_group % SIMD_N) + b);
      bands[b].weight = down + expert_words<H, I, BITS>(expert);
      bands[b].scales = scales_of<BITS, GROUP, I>(down, ROUTED_ROWS) + group;
      bands[b].biases = biases_of<BITS, GROUP, I>(down, ROUTED_ROWS) + group;
    }
    direct_product<BITS, GROUP, I, BANDS, TOKENS, DEPTH, SIMD_K, AHEAD, THREADS>(
        acc, tile, hidden, x_rows, rows_valid, bands, H, slice, lane, thread_id);
  } else {
    for (int b = 0; b < BANDS; ++b) {
      bands[b].first = first_column + 16 * (BANDS * (simd_group % SIMD_N) + b);
      bands[b].weight = shared_down;
      bands[b].scales = scales_of<SHARED_BITS, SHARED_GROUP, I>(shared_down, H);
      bands[b].biases = biases_of<SHARED_BITS, SHARED_GROUP, I>(shared_down, H);
    }
    direct_product<SHARED_BITS, SHARED_GROUP, I, BANDS, TOKENS, DEPTH, SIMD_K, AHEAD, THREADS>(
        acc, tile, hidden, x_rows, rows_valid, bands, H, slice, lane, thread_id);
  }
  threadgroup float* sums = (threadgroup float*)shared_memory;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  direct_store<BANDS, TOKENS>(sums + simd_group * 16 * BANDS * (TOKENS + 1), acc, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_id; i < rows_valid * BN; i += THREADS) {
    const int row = i / BN;
    const int column = i % BN;
    float value = 0.0f;
    for (int s = 0; s < SIMD_K; ++s) {
      value += sums[(s * BN + column) * (TOKENS + 1) + row];
    }
    if (first_column + column < H) {
      out[size_t(first_row + uint(row)) * H + first_column + column] = bfloat(value);
    }
  }
}
