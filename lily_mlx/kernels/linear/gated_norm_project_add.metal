// out[n] = residual[n] + sum_k weight[n, k] * bfloat16(norm(y)[k] * norm_weight[k % HEAD] * silu(z[k])), where
// norm is an RMSNorm over heads of HEAD values, y is [1, K] and z is projection[0, Z_OFFSET : Z_OFFSET + K].
//
// Grid: 32 * SIMDGROUPS threads for each threadgroup, enough of them for the N rows of the weight.
// Every threadgroup computes the input for itself into threadgroup memory; a simdgroup owns
// ROWS * 32 / LANES rows. Bytes: the weight once, y and z (from cache) once for each threadgroup.
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
stage_gated_norm<HEAD, K, 32 * SIMDGROUPS>(
    staged, y, projection + Z_OFFSET, norm_weight, EPS, thread_index_in_threadgroup);
threadgroup_barrier(mem_flags::mem_threadgroup);

float sums[ROWS];
clear_sums<ROWS>(sums);
accumulate_rows<BITS, GROUP, K, ROWS, LANES, AHEAD>(sums, ahead, staged, weight, scales, biases, rows, row_lane);
sum_rows<ROWS, LANES>(sums);
#pragma unroll
for (int i = 0; i < ROWS; ++i) {
  if (owns_row<LANES>(i, lane) && first + i < N) {
    out[first + i] = bfloat(sums[i] + float(residual[first + i]));
  }
}
