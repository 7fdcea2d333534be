// Matrix-vector products with the experts' weights, for the ablations of the fused expert chains.
// Needs quantized.h before it.

// Where this lane's set of ROWS rows starts: LANES lanes share a set, a simdgroup has 32 / LANES sets.
template <int ROWS, int LANES>
inline int set_row(int simdgroup, uint lane) {
  return (simdgroup * (32 / LANES) + int(lane) / LANES) * ROWS;
}

// The set's rows, those beyond the last replaced by the last: they are computed and not written.
template <int N, int ROWS>
inline void begin_rows(thread int (&rows)[ROWS], thread float (&sums)[ROWS], int first) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    rows[i] = metal::min(first + i, N - 1);
    sums[i] = 0.0f;
  }
}

// 32 values of x: from memory, or from threadgroup memory where store_staged put them.
inline void load_x(const device bfloat* x, int unit, thread float (&values)[UNIT]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unpack_eight(((const device uint4*)x)[4 * unit + i], &values[8 * i]);
  }
}

inline void load_x(const threadgroup uint4* x, int unit, thread float (&values)[UNIT]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unpack_eight(x[staged_index(unit, i)], &values[8 * i]);
  }
}

// sums[i] += this lane's share of dot(weight[rows[i]], x). The pointers stand at the expert's matrix [N, K]; `lane`
// counts within the row's LANES lanes.
template <int BITS, int GROUP, int K, int ROWS, int LANES, typename X>
inline void add_rows(
    thread float (&sums)[ROWS],
    X x,
    const device uint* weight,
    const device bfloat* scales,
    const device bfloat* biases,
    const thread int (&rows)[ROWS],
    int lane) {
  for (int unit = lane; unit < K / UNIT; unit += LANES) {
    Codes<BITS> codes[ROWS];
    float scale[ROWS];
    float bias[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const size_t row = size_t(rows[i]);
      const size_t group = row * (K / GROUP) + unit / (GROUP / UNIT);
      codes[i] = load_codes<BITS>(weight + row * (K / UNIT * BITS) + unit * BITS);
      scale[i] = float(scales[group]);
      bias[i] = float(biases[group]);
    }
    float values[UNIT];
    load_x(x, unit, values);
    const float sum = prepare_unit<BITS>(values);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      sums[i] = metal::fma(scale[i], codes_dot<BITS>(codes[i], values), metal::fma(bias[i], sum, sums[i]));
    }
  }
}

// out[row] = the sum over the row's lanes.
template <int N, int ROWS, int LANES>
inline void write_rows(device float* out, thread float (&sums)[ROWS], int first, uint lane) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float sum = lanes_sum<LANES>(sums[i]);
    if (int(lane) % LANES == 0 && first + i < N) {
      out[first + i] = sum;
    }
  }
}
