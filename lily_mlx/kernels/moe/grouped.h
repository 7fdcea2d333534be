// The grouped matmul's loops: acc += A * W^T for one block of rows of one expert. Needs operands.h and an
// engine: tile.h with simdgroup_engine.h, or tensor_engine.h.
// THREADS threads bring BK columns of both operands at a time to tiles in threadgroup memory, STRIDE values per row, and
// have read the next AHEAD times BK by then. Each simdgroup multiplies its TM x TN part, which stands at (tile_row, tile_column) of
// the BM x BN tile; rows from rows_valid on are skipped where a whole fragment of them is.
// BK * AHEAD divides K. Every thread of the threadgroup must call these together.

// Units of a tile whose first BN rows come from the gate's matrix and the others from the up matrix.
template <int BITS, int GROUP, int K, int BN, int BK, int THREADS, int COUNT>
inline void read_gate_up_units(
    thread WeightUnits<BITS, COUNT>& units,
    const device uint* gate,
    const device bfloat* gate_scales,
    const device bfloat* gate_biases,
    const device uint* up,
    const device bfloat* up_scales,
    const device bfloat* up_biases,
    int rows_valid,
    int column,
    int thread_id) {
  constexpr int UNITS = BK / UNIT;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    int index = thread_id + THREADS * i;
    bool is_up = index >= BN * UNITS;
    int row = metal::min(index / UNITS - (is_up ? BN : 0), rows_valid - 1);
    int unit = column / UNIT + index % UNITS;
    const device uint* words = is_up ? up : gate;
    const device bfloat* scales = is_up ? up_scales : gate_scales;
    const device bfloat* biases = is_up ? up_biases : gate_biases;
    size_t group = size_t(row) * (K / GROUP) + unit / (GROUP / UNIT);
    units.codes[i] = load_codes<BITS>(words + size_t(row) * (K / UNIT * BITS) + unit * BITS);
    units.scales[i] = scales[group];
    units.biases[i] = biases[group];
  }
}

// gate_acc += X * gate^T and up_acc += X * up^T for gathered rows of x [*, K]. The weight pointers stand at the tile's
// first output row; columns_valid output rows exist.
template <
    int BITS, int GROUP, int K, int BM, int BN, int BK, int AHEAD, int STRIDE, int TM, int TN, int THREADS,
    typename Accumulator>
inline void multiply_gate_up(
    thread Accumulator& gate_acc,
    thread Accumulator& up_acc,
    threadgroup bfloat* x_tile,
    threadgroup bfloat* weight_tile,
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
  RowPieces<LILY_SHARE(BM * BK / 8, THREADS), AHEAD> pieces;
  WeightUnits<BITS, LILY_SHARE(2 * BN * BK / UNIT, THREADS)> units[AHEAD];
  locate_gathered_rows<BM, BK, K, THREADS>(pieces, tokens, rows_valid, thread_id);
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    read_rows(pieces, x, i * BK, i);
    read_gate_up_units<BITS, GROUP, K, BN, BK, THREADS>(
        units[i], gate, gate_scales, gate_biases, up, up_scales, up_biases, columns_valid, i * BK, thread_id);
  }
  for (int start = 0; start < K; start += AHEAD * BK) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      store_rows<BM, BK, STRIDE, THREADS>(x_tile, pieces, i, thread_id);
      store_units<BITS, 2 * BN, BK, STRIDE, THREADS>(weight_tile, units[i], thread_id);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (start + AHEAD * BK < K) {
        const int column = start + (AHEAD + i) * BK;
        read_rows(pieces, x, column, i);
        read_gate_up_units<BITS, GROUP, K, BN, BK, THREADS>(
            units[i], gate, gate_scales, gate_biases, up, up_scales, up_biases, columns_valid, column, thread_id);
      }
      tile_multiply_transposed<TM, TN, BK>(
          gate_acc, x_tile + tile_row * STRIDE, STRIDE, weight_tile + tile_column * STRIDE, STRIDE,
          rows_valid - tile_row);
      tile_multiply_transposed<TM, TN, BK>(
          up_acc, x_tile + tile_row * STRIDE, STRIDE, weight_tile + (BN + tile_column) * STRIDE, STRIDE,
          rows_valid - tile_row);
    }
  }
}

// acc += X * weight^T for consecutive rows of x [*, K], `x` at the block's first row.
template <
    int BITS, int GROUP, int K, int BM, int BN, int BK, int AHEAD, int STRIDE, int TM, int TN, int THREADS,
    typename Accumulator>
inline void multiply_rows(
    thread Accumulator& acc,
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
  RowPieces<LILY_SHARE(BM * BK / 8, THREADS), AHEAD> pieces;
  WeightUnits<BITS, LILY_SHARE(BN * BK / UNIT, THREADS)> units[AHEAD];
  locate_rows<BM, BK, K, THREADS>(pieces, rows_valid, thread_id);
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    read_rows(pieces, x, i * BK, i);
    read_units<BITS, GROUP, K, BN, BK, THREADS>(units[i], weight, scales, biases, columns_valid, i * BK, thread_id);
  }
  for (int start = 0; start < K; start += AHEAD * BK) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      store_rows<BM, BK, STRIDE, THREADS>(x_tile, pieces, i, thread_id);
      store_units<BITS, BN, BK, STRIDE, THREADS>(weight_tile, units[i], thread_id);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (start + AHEAD * BK < K) {
        const int column = start + (AHEAD + i) * BK;
        read_rows(pieces, x, column, i);
        read_units<BITS, GROUP, K, BN, BK, THREADS>(
            units[i], weight, scales, biases, columns_valid, column, thread_id);
      }
      tile_multiply_transposed<TM, TN, BK>(
          acc, x_tile + tile_row * STRIDE, STRIDE, weight_tile + tile_column * STRIDE, STRIDE,
          rows_valid - tile_row);
    }
  }
}
