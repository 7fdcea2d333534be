// Attention, last launch: joins the parts of each query row and applies the output gate.
//
//   out = sigmoid(gate) * sum_p 2^(m_p - M) partial_p / sum_p 2^(m_p - M) l_p,   M = max_p m_p,  (m_p, l_p) = stats
//
// The stats of all rows stand behind all partial sums, in one input of [rows, parts, D + 2] values.
// Grid: (D / 32, rows = tokens * HQ), 8 simdgroups in a threadgroup. A threadgroup owns 32 dimensions of one row; its
// simdgroups take the parts in turn. Parts with l_p = 0 are not read. Moves 4 * D bytes per part and row.
constexpr int SIMDGROUPS = 8;
threadgroup float scratch[SIMDGROUPS];
threadgroup float part_values[SIMDGROUPS][32];
threadgroup float part_weights[SIMDGROUPS];

const uint lane = thread_index_in_simdgroup;
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int row = int(threadgroup_position_in_grid.y);
const int parts = partial_shape[1];
const device float* stats = partial + size_t(threadgroups_per_grid.y) * parts * D;
const int dim = int(threadgroup_position_in_grid.x) * 32 + int(lane);
const size_t first = size_t(row) * parts;

float largest = -INFINITY;
for (int p = int(thread_index_in_threadgroup); p < parts; p += 32 * SIMDGROUPS) {
  largest = metal::max(largest, stats[2 * (first + p)]);
}
largest = threadgroup_max<SIMDGROUPS>(largest, scratch, simdgroup, lane);

float value = 0.0f;
float weight = 0.0f;
for (int p = simdgroup; p < parts; p += SIMDGROUPS) {
  const float part_sum = stats[2 * (first + p) + 1];
  if (part_sum > 0.0f) {
    const float shrink = metal::exp2(stats[2 * (first + p)] - largest);
    weight += shrink * part_sum;
    value = metal::fma(shrink, partial[(first + p) * D + dim], value);
  }
}
part_values[simdgroup][lane] = value;
if (lane == 0) {
  part_weights[simdgroup] = weight;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup == 0) {
  value = 0.0f;
  weight = 0.0f;
  for (int s = 0; s < SIMDGROUPS; ++s) {
    value += part_values[s][lane];
    weight += part_weights[s];
  }
  const int head = row % HQ;
  const float gate = float(proj[size_t(row / HQ) * P + (2 * head + 1) * D + dim]);
  out[size_t(row) * D + dim] = bfloat(value / weight / (1.0f + metal::exp(-gate)));
}
