// Prefill: gate and up projections of every row and SwiGLU of a gated MLP.
//   hidden[m, n] = bfloat(swiglu(dot(gate[n], x[m]), dot(up[n], x[m]))), x [M, K], gate and up [N, K]
// Weights are dequantised to bfloat tile by tile in threadgroup memory; products add in float32.
// Grid: (tiles of BN columns of N, blocks of BM rows), SIMD_M x SIMD_N simdgroups in each.
// Bytes: per threadgroup 2 BM K of x and two weight tiles [BN, K], then 2 BM BN written.
constexpr int THREADS = 32 * SIMD_M * SIMD_N;
constexpr int STRIDE = BK + 8;
constexpr int TM = BM / SIMD_M;
constexpr int TN = BN / SIMD_N;
threadgroup uint4 x_pieces[BM * STRIDE / 8];
threadgroup uint4 weight_pieces[2 * BN * STRIDE / 8];
threadgroup uint row_ids[BM];
const uint lane = thread_index_in_simdgroup;
const int thread_id = int(thread_index_in_threadgroup);
const int simd_group = int(simdgroup_index_in_threadgroup);
const int first_row = int(threadgroup_position_in_grid.y) * BM;
const int rows_valid = metal::min(int(x_shape[0]) - first_row, BM);
for (int i = thread_id; i < BM; i += THREADS) {
  row_ids[i] = uint(first_row + i);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const int first_column = int(threadgroup_position_in_grid.x) * BN;
const int columns_valid = N - first_column;
const int tile_row = simd_group % SIMD_M * TM;
const int tile_column = simd_group / SIMD_M * TN;
const size_t word = size_t(first_column) * (K / UNIT * BITS);
const size_t group = size_t(first_column) * (K / GROUP);
LILY_ACCUMULATOR(gate_acc, TM, TN, BK);
LILY_ACCUMULATOR(up_acc, TM, TN, BK);
accumulator_clear(gate_acc);
accumulator_clear(up_acc);
multiply_gate_up<BITS, GROUP, K, BM, BN, BK, AHEAD, STRIDE, TM, TN, THREADS>(
    gate_acc, up_acc, (threadgroup bfloat*)x_pieces, (threadgroup bfloat*)weight_pieces, x, row_ids, rows_valid,
    gate + word, scales_of<BITS, GROUP, K>(gate, N) + group, biases_of<BITS, GROUP, K>(gate, N) + group, up + word,
    scales_of<BITS, GROUP, K>(up, N) + group, biases_of<BITS, GROUP, K>(up, N) + group, columns_valid, tile_row,
    tile_column, thread_id);
#pragma unroll
for (int i = 0; i < accumulator_size(gate_acc); ++i) {
  const int row = tile_row + accumulator_row(gate_acc, i, lane);
  const int column = tile_column + accumulator_column(gate_acc, i, lane);
  if (row < rows_valid && column < columns_valid) {
    hidden[size_t(first_row + row) * N + first_column + column] = bfloat(swiglu(accumulator_get(gate_acc, i), accumulator_get(up_acc, i)));
  }
}
