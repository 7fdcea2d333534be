// Prefill: causal attention of a chunk over the cache that already holds it, times the sigmoid of its output gate.
//
//   out[m, h] = sigmoid(gate[m, h]) * sum_j softmax_j(q[m, h] . k[j] * D^-0.5) v[j],   j <= position + m
//
// Grid: (KV heads, blocks of SIMDGROUPS * M query rows); the blocks with the most keys start first. A simdgroup owns M
// rows from the first key to the last, see causal.h. Keys and values pass through a tile of KEYS rows each in
// threadgroup memory, the queries stay in registers. Moves 4 * D bytes per key and block.
threadgroup uint4 key_tile[KEYS * (D + 8) / 8];
threadgroup uint4 value_tile[KEYS * (D + 8) / 8];

const uint lane = thread_index_in_simdgroup;
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int tokens = q_shape[0];
const int row_count = tokens * G;
const int kv_head = int(threadgroup_position_in_grid.x);
const int block = int(threadgroups_per_grid.y - 1 - threadgroup_position_in_grid.y);
const int first_row = block * SIMDGROUPS * M;
const int last_row = metal::min(first_row + SIMDGROUPS * M, row_count) - 1;
const int end = position[0] + last_row / G + 1;

KeyValueRows cache;
cache.tail_begin = (position[0] + tokens) / TAIL * TAIL;
cache.capacity = keys_shape[1];
cache.head = kv_head;
RowSums<M, D, COLUMNS> state;
attend<M, D, COLUMNS, KEYS, G, HQ, TAIL, SIMDGROUPS>(
    state, q + kv_head * G * D, keys, values, tail_keys, tail_values, cache, position[0],
    first_row, row_count, 0, end, SCALE, (threadgroup bfloat*)key_tile,
    (threadgroup bfloat*)value_tile, int(thread_index_in_threadgroup), simdgroup, lane);

#pragma unroll
for (int g = 0; g < M / 8; ++g) {
  state.weights[g] = 1.0f / state.weights[g];
}
#pragma unroll
for (int c = 0; c < D / COLUMNS; ++c) {
#pragma unroll
  for (int i = 0; i < M * COLUMNS / 32; ++i) {
    const int row = first_row + simdgroup * M + state.sums[c].row(i, lane);
    if (row < row_count) {
      const int head = kv_head * G + row % G;
      const int dim = c * COLUMNS + state.sums[c].column(i, lane);
      const float gate = float(proj[size_t(row / G) * P + (2 * head + 1) * D + dim]);
      const float value = state.sums[c].get(i) * state.weights[state.group(i)];
      out[(size_t(row / G) * HQ + head) * D + dim] = bfloat(value / (1.0f + metal::exp(-gate)));
    }
  }
}
