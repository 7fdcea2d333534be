// logits[v] = sum_k weight[v, k] * bfloat16(x[k] * rsqrt(mean(x^2) + EPS) * norm_weight[k]), one row x [1, K],
// and for each part the best v by logits[v] (temperature 0) or by logits[v] / temperature + Gumbel noise:
// the largest of the latter over all v is a draw from softmax(logits / temperature).
//
// Grid: 32 * SIMDGROUPS threads for each of the parts. A part owns every PARTS-th block of rows.
// `sampling` holds the temperature first. The noise is keyed by (seed, position, v).
// Bytes: the weight once, logits once, x and norm_weight (from cache) once for each part.
threadgroup uint4 staged[K / 8];
threadgroup float part_values[SIMDGROUPS];
threadgroup uint part_indices[SIMDGROUPS];
const uint lane = thread_index_in_simdgroup;
const int part = int(threadgroup_position_in_grid.x);
const int parts = int(threadgroups_per_grid.x);
const float temperature = sampling[0];
const float inverse_temperature = temperature > 0.0f ? 1.0f / temperature : 1.0f;
const uint key = seed[0];
const uint step = uint(position[0]);
constexpr int SIMDGROUP_ROWS = ROWS * 32 / LANES;
const int blocks = (N + SIMDGROUP_ROWS * SIMDGROUPS - 1) / (SIMDGROUP_ROWS * SIMDGROUPS);
const int simd_group = int(simdgroup_index_in_threadgroup);
const int row_lane = int(lane) % LANES;
// The weights of a block are on their way while the input is prepared, or the block before is computed.
const device bfloat* scales = scales_of<BITS, GROUP, K>(weight, N);
const device bfloat* biases = biases_of<BITS, GROUP, K>(weight, N);
RowUnits<BITS, ROWS> ahead[AHEAD];
int rows[ROWS];
clamp_rows<ROWS>(rows, first_row<ROWS, LANES>(part * SIMDGROUPS + simd_group, lane), N);
start_rows<BITS, GROUP, K, ROWS, LANES, AHEAD>(ahead, weight, scales, biases, rows, row_lane);
stage_norm<K, 32 * SIMDGROUPS>(staged, x, norm_weight, EPS, thread_index_in_threadgroup, lane);
threadgroup_barrier(mem_flags::mem_threadgroup);

float best = -INFINITY;
uint best_row = 0xffffffffu;
for (int block = part; block < blocks; block += parts) {
  const int first = first_row<ROWS, LANES>(block * SIMDGROUPS + simd_group, lane);
  const int next = first_row<ROWS, LANES>((block + parts) * SIMDGROUPS + simd_group, lane);
  int next_rows[ROWS];
  float sums[ROWS];
  clamp_rows<ROWS>(rows, first, N);
  clamp_rows<ROWS>(next_rows, next, N);
  clear_sums<ROWS>(sums);
  accumulate_rows<BITS, GROUP, K, ROWS, LANES, AHEAD>(
      sums, ahead, staged, weight, scales, biases, rows, next_rows, block + parts < blocks, row_lane);
  sum_rows<ROWS, LANES>(sums);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    if (owns_row<LANES>(i, lane) && first + i < N) {
      const uint row = uint(first + i);
      float value = sums[i];
      logits[row] = value;
      if (temperature > 0.0f) {
        value = value * inverse_temperature + gumbel(philox(key, 0u, row, step));
      }
      take_better(best, best_row, value, row);
    }
  }
}

simd_best(best, best_row);
if (lane == 0) {
  part_values[simd_group] = best;
  part_indices[simd_group] = best_row;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index_in_threadgroup == 0) {
  for (int i = 1; i < SIMDGROUPS; ++i) {
    take_better(best, best_row, part_values[i], part_indices[i]);
  }
  best_value[part] = best;
  best_index[part] = best_row;
}
