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

// BN rows of a weight from `row` on, columns from `column` on, as bfloat: copied if EXPANDED, else dequantised. Rows from
// rows_valid on become 0.
template <bool EXPANDED, int BITS, int GROUP, int K, int BN, int BK, int STRIDE>
inline void load_weights(
    threadgroup bfloat* tile,
    const device uint* weight,
    const device bfloat* scales,
    const device bfloat* biases,
    size_t first_row,
    int rows_valid,
    int column,
    int thread_id) {
  if (EXPANDED) {
    for (int i = thread_id; i < BN * BK / 8; i += 128) {
      const int row = i / (BK / 8);
      const int piece = i % (BK / 8);
      uint4 values = uint4(0u);
      if (row < rows_valid) {
        values = *(const device uint4*)(weight + (first_row + row) * (K / 2) + column / 2 + piece * 4);
      }
      *(threadgroup uint4*)(tile + row * STRIDE + piece * 8) = values;
    }
    return;
  }
  for (int i = thread_id; i < BN * BK / UNIT; i += 128) {
    const int row = i / (BK / UNIT);
    const int unit = column / UNIT + i % (BK / UNIT);
    threadgroup uint4* target = (threadgroup uint4*)(tile + row * STRIDE + i % (BK / UNIT) * UNIT);
    if (row < rows_valid) {
      const size_t source = first_row + row;
      const size_t group = source * (K / GROUP) + unit / (GROUP / UNIT);
      Codes<BITS> codes = load_codes<BITS>(weight + source * (K / UNIT * BITS) + unit * BITS);
      float values[UNIT];
      dequantize_unit<BITS>(codes, float(scales[group]), float(biases[group]), values);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        target[j] = pack_eight(&values[8 * j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        target[j] = uint4(0u);
      }
    }
  }
}
