// out[n] = sum_k weight[n, k] * bfloat16(x[k] * rsqrt(mean(x^2) + EPS) * norm_weight[k]), one row x [1, K].
//
// Grid: 32 * SIMDGROUPS threads for each threadgroup, enough of them for the N rows of the weight.
// Every threadgroup normalises x for itself into threadgroup memory; a simdgroup owns ROWS * 32 / LANES rows.
// Bytes: the weight once, x and norm_weight (from cache) once for each threadgroup.
threadgroup uint4 staged[K / 8];
const uint lane = thread_index_in_simdgroup;
// The first weights are on their way while the input is prepared.
const int block = int(threadgroup_position_in_grid.x) * SIMDGROUPS + int(simdgroup_index_in_threadgroup);
const int first = first_row<ROWS, LANES>(block, lane);
const int row_lane = int(lane) % LANES;
int rows[ROWS];
clamp_rows<ROWS>(rows, first, N);
const device bfloat* scales = scales_of<BITS, GROUP, K>(weight, N);
const device bfloat* biases = biases_of<BITS, GROUP, K>(weight, N);
RowUnits<BITS, ROWS> ahead[AHEAD];
start_rows<BITS, GROUP, K, ROWS, LANES, AHEAD>(ahead, weight, scales, biases, rows, row_lane);
stage_norm<K, 32 * SIMDGROUPS>(staged, x, norm_weight, EPS, thread_index_in_threadgroup, lane);
threadgroup_barrier(mem_flags::mem_threadgroup);

float sums[ROWS];
clear_sums<ROWS>(sums);
accumulate_rows<BITS, GROUP, K, ROWS, LANES, AHEAD>(sums, ahead, staged, weight, scales, biases, rows, row_lane);
sum_rows<ROWS, LANES>(sums);
#pragma unroll
for (int i = 0; i < ROWS; ++i) {
  if (owns_row<LANES>(i, lane) && first + i < N) {
    out[first + i] = static_cast<T>(sums[i]);
  }
}
