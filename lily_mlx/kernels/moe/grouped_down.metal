// Prefill: down projection of every row of hidden by its own expert.
//   out[r, h] = bfloat(dot(down[e, h], hidden[r])) for the rows r of each block (e, first row, count) of the block map;
// e = E is the shared expert. Weights are dequantised to bfloat tile by tile in threadgroup memory; products add in
// float32.
// Grid: (tiles of BN columns of H, blocks), SIMD_M x SIMD_N simdgroups in each; unused blocks (count 0) leave at once.
// Bytes: per threadgroup 2 BM I of hidden and a weight tile [BN, I], then 2 BM BN written.
constexpr int THREADS = 32 * SIMD_M * SIMD_N;
constexpr size_t ROUTED_ROWS = size_t(E) * H;
constexpr int STRIDE = BK + 8;
constexpr int TM = BM / SIMD_M;
constexpr int TN = BN / SIMD_N;
threadgroup uint4 x_pieces[BM * STRIDE / 8];
threadgroup uint4 weight_pieces[BN * STRIDE / 8];
const uint lane = thread_index_in_simdgroup;
const int thread_id = int(thread_index_in_threadgroup);
const int simd_group = int(simdgroup_index_in_threadgroup);
const uint block = threadgroup_position_in_grid.y;
const uint expert = blocks[4u * block];
const uint first_row = blocks[4u * block + 1u];
const int rows_valid = int(blocks[4u * block + 2u]);
if (rows_valid > 0) {
  const int first_column = int(threadgroup_position_in_grid.x) * BN;
  const int columns_valid = H - first_column;
  const int tile_row = simd_group % SIMD_M * TM;
  const int tile_column = simd_group / SIMD_M * TN;
  threadgroup bfloat* x_tile = (threadgroup bfloat*)x_pieces;
  threadgroup bfloat* weight_tile = (threadgroup bfloat*)weight_pieces;
  LILY_ACCUMULATOR(acc, TM, TN, BK);
  accumulator_clear(acc);
  if (expert < uint(E)) {
    const size_t word = expert_words<H, I, BITS>(expert) + size_t(first_column) * (I / UNIT * BITS);
    const size_t group = expert_groups<H, I, GROUP>(expert) + size_t(first_column) * (I / GROUP);
    multiply_rows<BITS, GROUP, I, BM, BN, BK, AHEAD, STRIDE, TM, TN, THREADS>(
        acc, x_tile, weight_tile, hidden + size_t(first_row) * I, rows_valid, down + word,
        scales_of<BITS, GROUP, I>(down, ROUTED_ROWS) + group, biases_of<BITS, GROUP, I>(down, ROUTED_ROWS) + group,
        columns_valid, tile_row, tile_column, thread_id);
  } else {
    const size_t word = size_t(first_column) * (I / UNIT * SHARED_BITS);
    const size_t group = size_t(first_column) * (I / SHARED_GROUP);
    multiply_rows<SHARED_BITS, SHARED_GROUP, I, BM, BN, BK, AHEAD, STRIDE, TM, TN, THREADS>(
        acc, x_tile, weight_tile, hidden + size_t(first_row) * I, rows_valid, shared_down + word,
        scales_of<SHARED_BITS, SHARED_GROUP, I>(shared_down, H) + group,
        biases_of<SHARED_BITS, SHARED_GROUP, I>(shared_down, H) + group, columns_valid, tile_row, tile_column,
        thread_id);
  }
#pragma unroll
  for (int i = 0; i < accumulator_size(acc); ++i) {
    const int row = tile_row + accumulator_row(acc, i, lane);
    const int column = tile_column + accumulator_column(acc, i, lane);
    if (row < rows_valid && column < columns_valid) {
      out[size_t(first_row + uint(row)) * H + first_column + column] = bfloat(accumulator_get(acc, i));
    }
  }
}
