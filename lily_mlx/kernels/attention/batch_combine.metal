// Decode attention of several sequences, last launch: joins the items of each query row and applies the output gate.
//
//   out[b, h] = sigmoid(gate) * sum_i 2^(m_i - M) partial_i / sum_i 2^(m_i - M) l_i,  M = max_i m_i,  (m_i, l_i) = stats
//
// over sequence b's items, places[b] = (position, first item, items, 0). The stats stand behind all partial sums, in one
// input of [items, HQ, D + 2] values. A sequence without items gets 0.
// Grid: (D / 32, rows = sequences * HQ), 8 simdgroups in a threadgroup. A threadgroup owns 32 dimensions of one row; its
// simdgroups take the items in turn. Moves 4 * D bytes per item and row.
constexpr int SIMDGROUPS = 8;
threadgroup float scratch[SIMDGROUPS];
threadgroup float item_values[SIMDGROUPS][32];
threadgroup float item_weights[SIMDGROUPS];

const uint lane = thread_index_in_simdgroup;
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int row = int(threadgroup_position_in_grid.y);
const int sequence = row / HQ;
const int head = row % HQ;
const int first = places[4 * sequence + 1];
const int count = places[4 * sequence + 2];
const device float* stats = partial + size_t(partial_shape[0]) * HQ * D;
const int dim = int(threadgroup_position_in_grid.x) * 32 + int(lane);

float largest = -INFINITY;
for (int i = int(thread_index_in_threadgroup); i < count; i += 32 * SIMDGROUPS) {
  largest = metal::max(largest, stats[2 * (size_t(first + i) * HQ + head)]);
}
largest = threadgroup_max<SIMDGROUPS>(largest, scratch, simdgroup, lane);

float value = 0.0f;
float weight = 0.0f;
for (int i = simdgroup; i < count; i += SIMDGROUPS) {
  const size_t entry = size_t(first + i) * HQ + head;
  const float shrink = metal::exp2(stats[2 * entry] - largest);
  weight += shrink * stats[2 * entry + 1];
  value = metal::fma(shrink, partial[entry * D + dim], value);
}
item_values[simdgroup][lane] = value;
if (lane == 0) {
  item_weights[simdgroup] = weight;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup == 0) {
  value = 0.0f;
  weight = 0.0f;
  for (int s = 0; s < SIMDGROUPS; ++s) {
    value += item_values[s][lane];
    weight += item_weights[s];
  }
  const float gate = float(proj[size_t(sequence) * P + (2 * head + 1) * D + dim]);
  out[size_t(row) * D + dim] = bfloat(count > 0 ? value / weight / (1.0f + metal::exp(-gate)) : 0.0f);
}
