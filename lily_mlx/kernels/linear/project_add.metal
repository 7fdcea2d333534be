// out[n] = residual[n] + sum_k weight[n, k] * x[k], one row x [1, K], rounded once.
//
// Grid: 32 * SIMDGROUPS threads for each threadgroup, enough of them for the N rows of the weight.
// A simdgroup owns ROWS * 32 / LANES rows. Bytes: the weight once, x (from cache) once for each simdgroup.
const uint lane = thread_index_in_simdgroup;
const int block = int(threadgroup_position_in_grid.x) * SIMDGROUPS + int(simdgroup_index_in_threadgroup);
const int first = first_row<ROWS, LANES>(block, lane);
const int row_lane = int(lane) % LANES;
int rows[ROWS];
clamp_rows<ROWS>(rows, first, N);
const device bfloat* scales = scales_of<BITS, GROUP, K>(weight, N);
const device bfloat* biases = biases_of<BITS, GROUP, K>(weight, N);
RowUnits<BITS, ROWS> ahead[AHEAD];
start_rows<BITS, GROUP, K, ROWS, LANES, AHEAD>(ahead, weight, scales, biases, rows, row_lane);

float sums[ROWS];
clear_sums<ROWS>(sums);
accumulate_rows<BITS, GROUP, K, ROWS, LANES, AHEAD>(sums, ahead, x, weight, scales, biases, rows, row_lane);
sum_rows<ROWS, LANES>(sums);
#pragma unroll
for (int i = 0; i < ROWS; ++i) {
  if (owns_row<LANES>(i, lane) && first + i < N) {
    out[first + i] = bfloat(sums[i] + float(residual[first + i]));
  }
}
