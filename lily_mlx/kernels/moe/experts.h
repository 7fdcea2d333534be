// What the expert kernels share. Needs quantized.h before it.

// Where an expert's matrix [ROWS, K] starts in weights [E, ROWS, K], in words and in scales. 64-bit: the weights of
// one layer may hold more than 2^32 elements.
template <int ROWS, int K, int BITS>
inline size_t expert_words(uint expert) {
  return size_t(expert) * size_t(ROWS) * size_t(K / UNIT * BITS);
}

template <int ROWS, int K, int GROUP>
inline size_t expert_groups(uint expert) {
  return size_t(expert) * size_t(ROWS) * size_t(K / GROUP);
}

// A decode step's choice is one array of words: the experts of the TOP_K slots, then the bits of the scores of these slots
// and of the shared expert's, slot TOP_K. Where a slot's score stands:
template <int TOP_K>
inline uint score_index(uint slot) {
  return uint(TOP_K) + slot;
}

inline float sigmoid(float x) {
  return 1.0f / (1.0f + metal::precise::exp(-x));
}

// SwiGLU: silu(gate) * up.
inline float swiglu(float gate, float up) {
  return gate * sigmoid(gate) * up;
}

// result[i] = swiglu(dot(gate[rows[i]], x), dot(up[rows[i]], x)), in every one of the row's LANES lanes.
// The pointers stand at the expert's matrices [I, K]; x is staged by store_staged; `lane` counts within LANES.
template <int BITS, int GROUP, int K, int ROWS, int LANES>
inline void gate_up_rows(
    thread float (&result)[ROWS],
    const threadgroup uint4* x,
    const device uint* gate,
    const device bfloat* gate_scales,
    const device bfloat* gate_biases,
    const device uint* up,
    const device bfloat* up_scales,
    const device bfloat* up_biases,
    const thread int (&rows)[ROWS],
    int lane) {
  float gate_sums[ROWS];
  float up_sums[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    gate_sums[i] = 0.0f;
    up_sums[i] = 0.0f;
  }
  RowUnits<BITS, ROWS> gate_unit;
  RowUnits<BITS, ROWS> up_unit;
  int first = metal::min(lane, K / UNIT - 1);
  load_row_units<BITS, GROUP, K, ROWS>(gate_unit, first, gate, gate_scales, gate_biases, rows);
  load_row_units<BITS, GROUP, K, ROWS>(up_unit, first, up, up_scales, up_biases, rows);
  for (int unit = lane; unit < K / UNIT; unit += LANES) {
    float values[UNIT];
    load_unit(x, unit, values);
    float sum = prepare_unit<BITS>(values);
    int next = metal::min(unit + LANES, K / UNIT - 1);
    add_row_units<BITS, ROWS>(gate_sums, gate_unit, values, sum);
    if (unit + LANES < K / UNIT) {
      load_row_units<BITS, GROUP, K, ROWS>(gate_unit, next, gate, gate_scales, gate_biases, rows);
    }
    add_row_units<BITS, ROWS>(up_sums, up_unit, values, sum);
    if (unit + LANES < K / UNIT) {
      load_row_units<BITS, GROUP, K, ROWS>(up_unit, next, up, up_scales, up_biases, rows);
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float gate_value = lanes_sum<LANES>(gate_sums[i]);
    float up_value = lanes_sum<LANES>(up_sums[i]);
    result[i] = swiglu(gate_value, up_value);
  }
}
