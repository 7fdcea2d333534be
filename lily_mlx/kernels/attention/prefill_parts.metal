// Prefill of few rows over a long cache: as prefill_attention, but each threadgroup takes one part of the keys.
//
//   stats[row, part] = (m, sum_j 2^(s_j - m));  partial[row, part] = sum_j 2^(s_j - m) v[j];  combine.metal joins them
//   The stats stand behind all partial sums, in the same output.
//
// Grid: (KV heads, blocks of SIMDGROUPS * M query rows, parts of PART keys). A part that no row of the block sees
// leaves stats (-inf, 0) and no partial. Moves 4 * D bytes per key and block.
constexpr int THREADS = 32 * SIMDGROUPS;
threadgroup uint4 key_tile[KEYS * (D + 8) / 8];
threadgroup uint4 value_tile[KEYS * (D + 8) / 8];

const uint lane = thread_index_in_simdgroup;
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int tokens = q_shape[0];
const int row_count = tokens * G;
const int kv_head = int(threadgroup_position_in_grid.x);
const int first_row = int(threadgroup_position_in_grid.y) * SIMDGROUPS * M;
const int part = int(threadgroup_position_in_grid.z);
const int parts = int(threadgroups_per_grid.z);
device float* stats = partial + size_t(tokens * HQ) * parts * D;
const int last_row = metal::min(first_row + SIMDGROUPS * M, row_count) - 1;
const int begin = part * PART;
const int end = metal::min(begin + PART, position[0] + last_row / G + 1);

if (begin >= end) {
  for (int row = first_row + int(thread_index_in_threadgroup); row <= last_row; row += THREADS) {
    const size_t entry = (size_t(row / G) * HQ + kv_head * G + row % G) * parts + part;
    stats[2 * entry] = -INFINITY;
    stats[2 * entry + 1] = 0.0f;
  }
  return;
}
KeyValueRows cache;
cache.tail_begin = (position[0] + tokens) / TAIL * TAIL;
cache.capacity = keys_shape[1];
cache.head = kv_head;
RowSums<M, D, COLUMNS> state;
attend<M, D, COLUMNS, KEYS, G, HQ, TAIL, SIMDGROUPS>(
    state, q + kv_head * G * D, keys, values, tail_keys, tail_values, cache, position[0],
    first_row, row_count, begin, end, SCALE, (threadgroup bfloat*)key_tile,
    (threadgroup bfloat*)value_tile, int(thread_index_in_threadgroup), simdgroup, lane);

#pragma unroll
for (int g = 0; g < M / 8; ++g) {
  const int row = first_row + simdgroup * M + state.row(g, lane);
  if (row < row_count && Tile<8, 8>::column(0, lane) == 0) { // one lane of the row
    const size_t entry = (size_t(row / G) * HQ + kv_head * G + row % G) * parts + part;
    stats[2 * entry] = state.largest[g];
    stats[2 * entry + 1] = state.weights[g];
  }
}
#pragma unroll
for (int c = 0; c < D / COLUMNS; ++c) {
#pragma unroll
  for (int i = 0; i < M * COLUMNS / 32; ++i) {
    const int row = first_row + simdgroup * M + state.sums[c].row(i, lane);
    if (row < row_count) {
      const size_t entry = (size_t(row / G) * HQ + kv_head * G + row % G) * parts + part;
      partial[entry * D + c * COLUMNS + state.sums[c].column(i, lane)] = state.sums[c].get(i);
    }
  }
}
