// The grouped matmul's loops: acc += A * W^T for one block of rows of one expert. Needs tile.h, quantized.h.
// THREADS threads fill bfloat tiles with STRIDE elements per row in threadgroup memory, BK columns at a time; each
// simdgroup then multiplies its TM x TN part, which stands at (tile_row, tile_column) of the BM x BN tile.
// Every thread of the threadgroup must call these together.

// Rows tokens[0..rows_valid) of x [*, width], columns from `column` on; rows from rows_valid on become 0.
template <int BM, int BK, int STRIDE, int THREADS>
inline void load_gathered_tile(
    threadgroup bfloat* tile,
    const device bfloat* x,
    int width,
    const threadgroup uint* tokens,
    int rows_valid,
    int column,
    int thread_id) {
  constexpr int PIECES = BK / 8;
  for (int i = thread_id; i < BM * PIECES; i += THREADS) {
    int row = i / PIECES;
    int piece = i % PIECES;
    uint4 values = uint4(0u);
    if (row < rows_valid) {
      values = *(const device uint4*)(x + size_t(tokens[row]) * size_t(width) + column + piece * 8);
    }
    *(threadgroup uint4*)(tile + row * STRIDE + piece * 8) = values;
  }
}

// gate_acc += X * gate^T and up_acc += X * up^T for gathered rows of x [*, K]. The weight pointers stand at the tile's
// first output row; columns_valid output rows exist.
template <int BITS, int GROUP, int K, int BM, int BN, int BK, int STRIDE, int TM, int TN, int THREADS>
inline void multiply_gate_up(
    thread Tile<TM, TN>& gate_acc,
    thread Tile<TM, TN>& up_acc,
    threadgroup bfloat* x_tile,
    threadgroup bfloat* gate_tile,
    threadgroup bfloat* up_tile,
    const device bfloat* x,
    const threadgroup uint* tokens,
    int rows_valid,
    const device uint* gate,
    const device bfloat* gate_scales,
    const device bfloat* gate_biases,
    const device uint* up,
    const device bfloat* up_scales,
    const device bfloat* up_biases,
    int columns_valid,
    int tile_row,
    int tile_column,
    int thread_id) {
  for (int column = 0; column < K; column += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_gathered_tile<BM, BK, STRIDE, THREADS>(x_tile, x, K, tokens, rows_valid, column, thread_id);
    dequantize_tile<BITS, GROUP, K, BN, BK, THREADS>(
        gate_tile, STRIDE, gate, gate_scales, gate_biases, columns_valid, column, thread_id);
    dequantize_tile<BITS, GROUP, K, BN, BK, THREADS>(
        up_tile, STRIDE, up, up_scales, up_biases, columns_valid, column, thread_id);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tile_row < rows_valid) {
      tile_multiply_transposed<TM, TN, BK>(
          gate_acc, x_tile + tile_row * STRIDE, STRIDE, gate_tile + tile_column * STRIDE, STRIDE);
      tile_multiply_transposed<TM, TN, BK>(
          up_acc, x_tile + tile_row * STRIDE, STRIDE, up_tile + tile_column * STRIDE, STRIDE);
    }
  }
}

// acc += X * weight^T for consecutive rows of x [*, K], `x` at the block's first row.
template <int BITS, int GROUP, int K, int BM, int BN, int BK, int STRIDE, int TM, int TN, int THREADS>
inline void multiply_rows(
    thread Tile<TM, TN>& acc,
    threadgroup bfloat* x_tile,
    threadgroup bfloat* weight_tile,
    const device bfloat* x,
    int rows_valid,
    const device uint* weight,
    const device bfloat* scales,
    const device bfloat* biases,
    int columns_valid,
    int tile_row,
    int tile_column,
    int thread_id) {
  for (int column = 0; column < K; column += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_tile<BM, BK, THREADS>(x_tile, STRIDE, x, K, rows_valid, column, thread_id);
    dequantize_tile<BITS, GROUP, K, BN, BK, THREADS>(
        weight_tile, STRIDE, weight, scales, biases, columns_valid, column, thread_id);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tile_row < rows_valid) {
      tile_multiply_transposed<TM, TN, BK>(
          acc, x_tile + tile_row * STRIDE, STRIDE, weight_tile + tile_column * STRIDE, STRIDE);
    }
  }
}
