// Rows of x that are normalised on their way into a product (direct.h, which has to stand before this):
//   bfloat16(x[m, k] * rsqrt(mean_k(x[m]^2) + eps) * gains[k]), by the sums of rms_norm.metal, to the bit.
// Needs quantized.h as well.
#ifndef LILY_NORM_ROWS
#define LILY_NORM_ROWS

// The rows of a threadgroup, counted from its first. PARTS is the number of simdgroups that share a row in
// rms_norm.metal: sums are added up as there. Of each row the pieces of 8 columns from first_piece to end_piece are
// written to `normed`.
template <int PARTS>
struct NormRows {
  threadgroup float* scales;
  const device uint4* gains;
  device uint4* normed;
  int first_piece;
  int end_piece;
  int simd_group; // this thread's
  float eps;
};

// rsqrt(mean(row^2) + eps), in every lane of the simdgroup.
template <int K, int PARTS>
inline float row_scale(const device bfloat* row, float eps, uint lane) {
  const device uint4* pieces = (const device uint4*)row;
  float squares[PARTS];
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    squares[part] = 0.0f;
  }
  for (int start = 0; start < K / 8; start += 32 * PARTS) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int piece = start + 32 * part + int(lane);
      if (K % (256 * PARTS) == 0 || piece < K / 8) {
        float values[8];
        unpack_eight(pieces[piece], values);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          squares[part] = metal::fma(values[i], values[i], squares[part]);
        }
      }
    }
  }
  float total = 0.0f;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    total += simd_sum(squares[part]);
  }
  return metal::precise::rsqrt(total / float(K) + eps);
}

// The simdgroups share the rows. Those that have none left repeat the last one: control flow is the same for all.
template <int K, int TOKENS, int SIMDGROUPS, int PARTS>
inline void direct_prepare(const device bfloat* x, NormRows<PARTS> rows, int rows_valid, uint lane) {
  for (int first = 0; first < TOKENS; first += SIMDGROUPS) {
    const int row = first + rows.simd_group;
    const float scale = row_scale<K, PARTS>(x + size_t(metal::min(row, rows_valid - 1)) * K, rows.eps, lane);
    if (lane == 0 && row < rows_valid) {
      rows.scales[row] = scale;
    }
  }
}

template <int K, int DEPTH, int PARTS>
inline uint4 direct_piece(const device bfloat* x, NormRows<PARTS> rows, int piece, int first) {
  const int column = first + piece % (DEPTH / 8) * 8;
  if (K % DEPTH != 0 && column >= K) {
    return uint4(0u);
  }
  return ((const device uint4*)(x + size_t(piece / (DEPTH / 8)) * K))[column / 8];
}

template <int K, int DEPTH, int PARTS>
inline uint4 direct_values(NormRows<PARTS> rows, int piece, int first, uint4 packed) {
  const int row = piece / (DEPTH / 8);
  const int place = first / 8 + piece % (DEPTH / 8);
  if (K % DEPTH != 0 && place >= K / 8) {
    return packed;
  }
  const float scale = rows.scales[row];
  float values[8];
  float gains[8];
  unpack_eight(packed, values);
  unpack_eight(rows.gains[place], gains);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] = values[i] * scale * gains[i];
  }
  const uint4 result = pack_eight(values);
  if (place >= rows.first_piece && place < rows.end_piece) {
    rows.normed[size_t(row) * (K / 8) + size_t(place)] = result;
  }
  return result;
}
#endif
