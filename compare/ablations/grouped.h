// Loads of grouped.metal, whose threadgroups have 128 threads. Needs quantized.h before it.

// Rows sources[0..rows_valid) of x [*, width], columns from `column` on; rows from rows_valid on become 0.
template <int BM, int BK, int STRIDE>
inline void load_sources(
    threadgroup bfloat* tile,
    const device bfloat* x,
    int width,
    const threadgroup uint* sources,
    int rows_valid,
    int column,
    int thread_id) {
  for (int i = thread_id; i < BM * BK / 8; i += 128) {
    const int row = i / (BK / 8);
    const int piece = i % (BK / 8);
    uint4 values = uint4(0u);
    if (row < rows_valid) {
      values = *(const device uint4*)(x + size_t(sources[row]) * size_t(width) + column + piece * 8);
    }
    *(threadgroup uint4*)(tile + row * STRIDE + piece * 8) = values;
  }
}

// BN rows of a weight from `row` on, columns from `column` on, as bfloat: copied if EXPANDED, else dequantised.
template <bool EXPANDED, int BITS, int GROUP, int K, int BN, int BK, int STRIDE>
inline void load_weights(
    threadgroup bfloat* tile,
    const device uint* weight,
    const device bfloat* scales,
    const device bfloat* biases,
    size_t row,
    int rows_valid,
    int column,
    int thread_id) {
  if (EXPANDED) {
    const device bfloat* values = (const device bfloat*)weight + row * K;
    load_tile<BN, BK, 128>(tile, STRIDE, values, K, rows_valid, column, thread_id);
  } else {
    dequantize_tile<BITS, GROUP, K, BN, BK, 128>(
        tile, STRIDE, weight + row * (K / UNIT * BITS), scales + row * (K / GROUP), biases + row * (K / GROUP),
        rows_valid, column, thread_id);
  }
}
