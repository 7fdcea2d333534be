// Prefill: gate and up projections of every routed row and, for the shared expert, of every token, with SwiGLU.
//   hidden[r, i] = bfloat(swiglu(dot(gate[e, i], x[t]), dot(up[e, i], x[t])))
// for the rows r of each block (e, first row, count) of the block map; t = row_tokens[r], or r - S for the shared expert
// (e = E, rows S to S + M). Weights are dequantised to bfloat tile by tile in threadgroup memory; products add in float32.
// Grid: (tiles of BN columns of I, blocks), SIMD_M x SIMD_N simdgroups in each; unused blocks (count 0) leave at once.
// Bytes: per threadgroup 2 BM H of x and two weight tiles [BN, H], then 2 BM BN written.
constexpr int THREADS = 32 * SIMD_M * SIMD_N;
constexpr size_t ROUTED_ROWS = size_t(E) * I;
constexpr int STRIDE = BK + 8;
constexpr int TM = BM / SIMD_M;
constexpr int TN = BN / SIMD_N;
threadgroup uint4 x_pieces[BM * STRIDE / 8];
threadgroup uint4 weight_pieces[2 * BN * STRIDE / 8];
threadgroup uint tokens[BM];
const uint lane = thread_index_in_simdgroup;
const int thread_id = int(thread_index_in_threadgroup);
const int simd_group = int(simdgroup_index_in_threadgroup);
const uint block = threadgroup_position_in_grid.y;
const uint expert = blocks[4u * block];
const uint first_row = blocks[4u * block + 1u];
const int rows_valid = int(blocks[4u * block + 2u]);
if (rows_valid > 0) {
  const uint pairs = uint(row_tokens_shape[0]);
  for (int i = thread_id; i < rows_valid; i += THREADS) {
    const uint row = first_row + uint(i);
    if (expert < uint(E)) {
      tokens[i] = row_tokens[row];
    } else {
      tokens[i] = row - pairs;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int first_column = int(threadgroup_position_in_grid.x) * BN;
  const int columns_valid = I - first_column;
  const int tile_row = simd_group % SIMD_M * TM;
  const int tile_column = simd_group / SIMD_M * TN;
  threadgroup bfloat* x_tile = (threadgroup bfloat*)x_pieces;
  threadgroup bfloat* weight_tile = (threadgroup bfloat*)weight_pieces;
  LILY_ACCUMULATOR(gate_acc, TM, TN, BK);
  LILY_ACCUMULATOR(up_acc, TM, TN, BK);
  accumulator_clear(gate_acc);
  accumulator_clear(up_acc);
  if (expert < uint(E)) {
    const size_t word = expert_words<I, H, BITS>(expert) + size_t(first_column) * (H / UNIT * BITS);
    const size_t group = expert_groups<I, H, GROUP>(expert) + size_t(first_column) * (H / GROUP);
    multiply_gate_up<BITS, GROUP, H, BM, BN, BK, AHEAD, STRIDE, TM, TN, THREADS>(
        gate_acc, up_acc, x_tile, weight_tile, x, tokens, rows_valid, gate + word,
        scales_of<BITS, GROUP, H>(gate, ROUTED_ROWS) + group, biases_of<BITS, GROUP, H>(gate, ROUTED_ROWS) + group,
        up + word, scales_of<BITS, GROUP, H>(up, ROUTED_ROWS) + group,
        biases_of<BITS, GROUP, H>(up, ROUTED_ROWS) + group, columns_valid, tile_row, tile_column, thread_id);
  } else {
    const size_t word = size_t(first_column) * (H / UNIT * SHARED_BITS);
    const size_t group = size_t(first_column) * (H / SHARED_GROUP);
    multiply_gate_up<SHARED_BITS, SHARED_GROUP, H, BM, BN, BK, AHEAD, STRIDE, TM, TN, THREADS>(
        gate_acc, up_acc, x_tile, weight_tile, x, tokens, rows_valid, shared_gate + word,
        scales_of<SHARED_BITS, SHARED_GROUP, H>(shared_gate, I) + group,
        biases_of<SHARED_BITS, SHARED_GROUP, H>(shared_gate, I) + group, shared_up + word,
        scales_of<SHARED_BITS, SHARED_GROUP, H>(shared_up, I) + group,
        biases_of<SHARED_BITS, SHARED_GROUP, H>(shared_up, I) + group, columns_valid, tile_row, tile_column, thread_id);
  }
#pragma unroll
  for (int i = 0; i < accumulator_size(gate_acc); ++i) {
    const int row = tile_row + accumulator_row(gate_acc, i, lane);
    const int column = tile_column + accumulator_column(gate_acc, i, lane);
    if (row < rows_valid && column < columns_valid) {
      hidden[size_t(first_row + uint(row)) * I + first_column + column] =
          bfloat(swiglu(accumulator_get(gate_acc, i), accumulator_get(up_acc, i)));
    }
  }
}
