// Grouped matmul for the ablation of dequantisation inside the matmul: one text, with and without it.
//   GATED:  out[r, n] = bfloat(swiglu(dot(first[e, n], x[t]), dot(second[e, n], x[t])))
//   else:   out[r, n] = bfloat(dot(first[e, n], x[r]))
// for the rows r of each block (e, first row, count) of the block map; t = row_tokens[r], or r - S for the shared expert
// (e = E). Weights [E, N, K]: codes, dequantised tile by tile in threadgroup memory, or, if EXPANDED, bfloat pairs
// that another launch wrote.
// Grid: (tiles of BN columns, blocks), 128 threads in 4 simdgroups, SIMD_ROWS of them above each other.
// Bytes: per threadgroup 2 BM K of x and one or two weight tiles [BN, K], then 2 BM BN written.
constexpr int STRIDE = BK + 8;
constexpr size_t ROUTED_ROWS = size_t(E) * N;
constexpr int TM = BM / SIMD_ROWS;
constexpr int TN = BN * SIMD_ROWS / 4;
threadgroup uint4 x_pieces[BM * STRIDE / 8];
threadgroup uint4 first_pieces[BN * STRIDE / 8];
threadgroup uint4 second_pieces[BN * STRIDE / 8];
threadgroup uint sources[BM];
const uint lane = thread_index_in_simdgroup;
const int thread_id = int(thread_index_in_threadgroup);
const int simd_group = int(simdgroup_index_in_threadgroup);
const uint block = threadgroup_position_in_grid.y;
const uint expert = blocks[4u * block];
const uint first_row = blocks[4u * block + 1u];
const int rows_valid = int(blocks[4u * block + 2u]);
if (rows_valid > 0) {
  const bool is_shared = expert >= uint(E);
  if (thread_id < rows_valid) {
    const uint row = first_row + uint(thread_id);
    uint source = row;
    if (GATED) {
      source = is_shared ? row - uint(row_tokens_shape[0]) : row_tokens[row];
    }
    sources[thread_id] = source;
  }
  const int first_column = int(threadgroup_position_in_grid.x) * BN;
  const int columns_valid = N - first_column;
  const int tile_row = simd_group % SIMD_ROWS * TM;
  const int tile_column = simd_group / SIMD_ROWS * TN;
  threadgroup bfloat* x_tile = (threadgroup bfloat*)x_pieces;
  threadgroup bfloat* first_tile = (threadgroup bfloat*)first_pieces;
  threadgroup bfloat* second_tile = (threadgroup bfloat*)second_pieces;
  const size_t row = (is_shared ? size_t(0) : size_t(expert) * N) + first_column;
  Tile<TM, TN> first_sum;
  Tile<TM, TN> second_sum;
  first_sum.clear();
  second_sum.clear();
  for (int column = 0; column < K; column += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_sources<BM, BK, STRIDE>(x_tile, x, K, sources, rows_valid, column, thread_id);
    if (is_shared) {
      load_weights<EXPANDED, SHARED_BITS, SHARED_GROUP, K, BN, BK, STRIDE>(
          first_tile, shared_first, scales_of<SHARED_BITS, SHARED_GROUP, K>(shared_first, N),
          biases_of<SHARED_BITS, SHARED_GROUP, K>(shared_first, N), row, columns_valid, column, thread_id);
    } else {
      load_weights<EXPANDED, BITS, GROUP, K, BN, BK, STRIDE>(
          first_tile, first, scales_of<BITS, GROUP, K>(first, ROUTED_ROWS),
          biases_of<BITS, GROUP, K>(first, ROUTED_ROWS), row, columns_valid, column, thread_id);
    }
    if (GATED) {
      if (is_shared) {
        load_weights<EXPANDED, SHARED_BITS, SHARED_GROUP, K, BN, BK, STRIDE>(
            second_tile, shared_second, scales_of<SHARED_BITS, SHARED_GROUP, K>(shared_second, N),
            biases_of<SHARED_BITS, SHARED_GROUP, K>(shared_second, N), row, columns_valid, column, thread_id);
      } else {
        load_weights<EXPANDED, BITS, GROUP, K, BN, BK, STRIDE>(
            second_tile, second, scales_of<BITS, GROUP, K>(second, ROUTED_ROWS),
            biases_of<BITS, GROUP, K>(second, ROUTED_ROWS), row, columns_valid, column, thread_id);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tile_row < rows_valid) {
      tile_multiply_transposed<TM, TN, BK>(
          first_sum, x_tile + tile_row * STRIDE, STRIDE, first_tile + tile_column * STRIDE, STRIDE);
      if (GATED) {
        tile_multiply_transposed<TM, TN, BK>(
            second_sum, x_tile + tile_row * STRIDE, STRIDE, second_tile + tile_column * STRIDE, STRIDE);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Tile<TM, TN>::ELEMENTS; ++i) {
    const int m = tile_row + Tile<TM, TN>::row(i, lane);
    const int n = tile_column + Tile<TM, TN>::column(i, lane);
    if (m < rows_valid && n < columns_valid) {
      float value = first_sum.get(i);
      if (GATED) {
        value = value * (1.0f / (1.0f + metal::precise::exp(-value))) * second_sum.get(i);
      }
      out[size_t(first_row + uint(m)) * N + first_column + n] = bfloat(value);
    }
  }
}
