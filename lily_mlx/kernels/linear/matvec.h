// How the decode kernels share out a weight's rows. Needs quantized.h before it.
//
// LANES lanes walk one row; the 32 / LANES sets of a simdgroup work on different rows, ROWS at a time.
// Block b of rows (one simdgroup's) starts at row b * ROWS * 32 / LANES.

template <int ROWS, int LANES>
inline int first_row(int block, uint lane) {
  return (block * (32 / LANES) + int(lane) / LANES) * ROWS;
}

// The rows of a set. Rows beyond the last are replaced by the last: they are computed and not written.
template <int ROWS>
inline void clamp_rows(thread int (&rows)[ROWS], int first, int count) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    rows[i] = metal::min(first + i, count - 1);
  }
}

template <int ROWS>
inline void clear_sums(thread float (&sums)[ROWS]) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    sums[i] = 0.0f;
  }
}

template <int ROWS, int LANES>
inline void sum_rows(thread float (&sums)[ROWS]) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    sums[i] = lanes_sum<LANES>(sums[i]);
  }
}

// Whether this lane writes the i-th of its set's rows: the lanes take turns.
template <int LANES>
inline bool owns_row(int i, uint lane) {
  return int(lane) % LANES == i % LANES;
}
