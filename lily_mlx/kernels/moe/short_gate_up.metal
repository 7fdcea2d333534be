// Prefill, blocks of few rows: grouped_gate_up, with weights that go from memory to registers only (direct.h).
//   hidden[r, i] = bfloat(swiglu(dot(gate[e, i], x[t]), dot(up[e, i], x[t])))
// for the rows r of each block (e, first row, count) of the block map; t = row_tokens[r], or r - S for the shared expert
// (e = E, rows S to S + M). Weights are rounded to bfloat after dequantisation; products add in float32.
// Grid: (tiles of 16 * BANDS * SIMD_N columns of I, blocks of up to TOKENS rows). A threadgroup has SIMD_N * SIMD_K simdgroups:
// SIMD_K of them share 16 * BANDS gate rows and as many up rows, each for a part of every DEPTH columns of K. Unused blocks leave at once.
// Bytes: the block's gate and up rows once, 2 TOKENS H of x from cache, then 2 bytes per row and column written.
constexpr int THREADS = 32 * SIMD_N * SIMD_K;
constexpr size_t ROUTED_ROWS = size_t(E) * I;
constexpr int BN = 16 * BANDS * SIMD_N;
constexpr int X_PIECES = TOKENS * (DEPTH + 8) / 8;
constexpr int SUM_PIECES = (SIMD_K * 2 * BN * (TOKENS + 1) + 3) / 4;
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
  const uint pairs = uint(row_tokens_shape[0]);
  if (thread_id < TOKENS) {
    const uint row = first_row + uint(metal::min(thread_id, rows_valid - 1));
    if (expert < uint(E)) {
      x_rows[thread_id] = row_tokens[row];
    } else {
      x_rows[thread_id] = row - pairs;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int first_column = int(threadgroup_position_in_grid.x) * BN;
  const int slice = simd_group / SIMD_N;
  threadgroup bfloat* tile = (threadgroup bfloat*)shared_memory;
  Tile<32 * BANDS, TOKENS> acc;
  acc.clear();
  DirectBand bands[2 * BANDS];
  for (int b = 0; b < BANDS; ++b) {
    bands[b].first = first_column + 16 * (BANDS * (simd_group % SIMD_N) + b);
    bands[BANDS + b].first = bands[b].first;
  }
  if (expert < uint(E)) {
    const size_t word = expert_words<I, H, BITS>(expert);
    const size_t group = expert_groups<I, H, GROUP>(expert);
    for (int b = 0; b < BANDS; ++b) {
      bands[b].weight = gate + word;
      bands[b].scales = scales_of<BITS, GROUP, H>(gate, ROUTED_ROWS) + group;
      bands[b].biases = biases_of<BITS, GROUP, H>(gate, ROUTED_ROWS) + group;
      bands[BANDS + b].weight = up + word;
      bands[BANDS + b].scales = scales_of<BITS, GROUP, H>(up, ROUTED_ROWS) + group;
      bands[BANDS + b].biases = biases_of<BITS, GROUP, H>(up, ROUTED_ROWS) + group;
    }
    direct_product<BITS, GROUP, H, 2 * BANDS, TOKENS, DEPTH, SIMD_K, AHEAD, THREADS>(
        acc, tile, x, x_rows, rows_valid, bands, I, slice, lane, thread_id);
  } else {
    for (int b = 0; b < BANDS; ++b) {
      bands[b].weight = shared_gate;
      bands[b].scales = scales_of<SHARED_BITS, SHARED_GROUP, H>(shared_gate, I);
      bands[b].biases = biases_of<SHARED_BITS, SHARED_GROUP, H>(shared_gate, I);
      bands[BANDS + b].weight = shared_up;
      bands[BANDS + b].scales = scales_of<SHARED_BITS, SHARED_GROUP, H>(shared_up, I);
      bands[BANDS + b].biases = biases_of<SHARED_BITS, SHARED_GROUP, H>(shared_up, I);
    }
    direct_product<SHARED_BITS, SHARED_GROUP, H, 2 * BANDS, TOKENS, DEPTH, SIMD_K, AHEAD, THREADS>(
        acc, tile, x, x_rows, rows_valid, bands, I, slice, lane, thread_id);
  }
  threadgroup float* sums = (threadgroup float*)shared_memory;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  direct_store<2 * BANDS, TOKENS>(sums + simd_group * 32 * BANDS * (TOKENS + 1), acc, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_id; i < rows_valid * BN; i += THREADS) {
    const int row = i / BN;
    const int column = i % BN;
    float gate_value = 0.0f;
    float up_value = 0.0f;
    for (int s = 0; s < SIMD_K; ++s) {
      const int gate_row = 2 * (s * BN + column / (16 * BANDS) * 16 * BANDS) + column % (16 * BANDS);
      gate_value += sums[gate_row * (TOKENS + 1) + row];
      up_value += sums[(gate_row + 16 * BANDS) * (TOKENS + 1) + row];
    }
    if (first_column + column < I) {
      hidden[size_t(first_row + uint(row)) * I + first_column + column] = bfloat(swiglu(gate_value, up_value));
    }
  }
}
