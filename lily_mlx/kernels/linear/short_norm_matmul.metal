// The norm of few rows and its product in one launch, with weights that go from memory to registers only (direct.h):
//   normed[m, k] = bfloat16(x[m, k] * rsqrt(mean_k(x[m]^2) + EPS) * norm_weight[k]), x [M, K]
//   out[m, n] = sum_k normed[m, k] * bfloat16(weight[n, k]), weight [N, K].
// Grid: (tiles of 16 * BANDS * SIMD_N columns of N, blocks of TOKENS rows). A threadgroup has SIMD_N * SIMD_K
// simdgroups: SIMD_K of them share 16 * BANDS weight rows, each for a part of every DEPTH columns of K. Every threadgroup
// normalises all columns of its rows for itself and writes its SHARE of them, so that each value is written once.
// Bytes: the weight once for each block of rows and x twice for each tile (from cache but for the first time), out and
// normed once.
constexpr int THREADS = 32 * SIMD_N * SIMD_K;
constexpr int BN = 16 * BANDS * SIMD_N;
constexpr int SHARE = (K / 8 + (N + BN - 1) / BN - 1) / ((N + BN - 1) / BN); // pieces of 8 columns
constexpr int WIDTH = TOKENS < 16 ? TOKENS : 16; // rows of x in a tile of sums
constexpr int X_PIECES = TOKENS * (DEPTH + 8) / 8;
constexpr int SUM_PIECES = (SIMD_K * BN * (WIDTH + 1) + 3) / 4;
threadgroup uint4 shared_memory[X_PIECES > SUM_PIECES ? X_PIECES : SUM_PIECES];
threadgroup float scales[TOKENS];
const uint lane = thread_index_in_simdgroup;
const int thread_id = int(thread_index_in_threadgroup);
const int simd_group = int(simdgroup_index_in_threadgroup);
const int tile = int(threadgroup_position_in_grid.x);
const size_t first_row = size_t(threadgroup_position_in_grid.y) * TOKENS;
const int height = metal::min(int(x_shape[0]) - int(first_row), TOKENS);
const int first_column = tile * BN;
Tile<16 * BANDS, WIDTH> acc[TOKENS / WIDTH];
DirectBand bands[BANDS];
for (int b = 0; b < BANDS; ++b) {
  bands[b].first = first_column + 16 * (BANDS * (simd_group % SIMD_N) + b);
  bands[b].weight = weight;
  bands[b].scales = scales_of<BITS, GROUP, K>(weight, N);
  bands[b].biases = biases_of<BITS, GROUP, K>(weight, N);
}
NormRows<PARTS> rows;
rows.scales = scales;
rows.gains = (const device uint4*)norm_weight;
rows.normed = (device uint4*)(normed + first_row * K);
rows.first_piece = tile * SHARE;
rows.end_piece = rows.first_piece + SHARE;
rows.simd_group = simd_group;
rows.eps = EPS;
direct_product<BITS, GROUP, K, BANDS, TOKENS, DEPTH, SIMD_K, AHEAD, X_AHEAD, THREADS, WIDTH, TOKENS / WIDTH>(
    acc, (threadgroup bfloat*)shared_memory, x + first_row * K, rows, height, bands, N, simd_group / SIMD_N, lane,
    thread_id);

threadgroup float* sums = (threadgroup float*)shared_memory;
#pragma unroll
for (int g = 0; g < TOKENS / WIDTH; ++g) {
  const int first = WIDTH * g;
  if (first < height) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    direct_store<BANDS, WIDTH>(sums + simd_group * 16 * BANDS * (WIDTH + 1), acc[g], lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_id; i < metal::min(WIDTH, height - first) * BN; i += THREADS) {
      const int row = i / BN;
      const int column = i % BN;
      if (first_column + column < N) {
        float value = 0.0f;
        for (int s = 0; s < SIMD_K; ++s) {
          value += sums[(s * BN + column) * (WIDTH + 1) + row];
        }
        out[(first_row + size_t(first + row)) * N + size_t(first_column + column)] = static_cast<T>(value);
      }
    }
  }
}
