// A lane's dimensions of a row, for attention_parts.metal. Needs kernels/attention/head.h before it.

// Values lane * E to lane * E + E of a row that starts at a multiple of 16 bytes.
template <bool COALESCED, int E>
inline void load_dims(const device bfloat* row, uint lane, thread float (&values)[E]) {
  if (COALESCED) {
    load_lane<E>(row, lane, values);
  } else {
#pragma unroll
    for (int i = 0; i < E; ++i) {
      values[i] = float(row[lane * E + i]);
    }
  }
}
