// Decode, one token: norm, gate and up projections and SwiGLU of a gated MLP.
//   hidden[n] = bfloat(swiglu(dot(gate[n], xn), dot(up[n], xn))), xn = bfloat(x * rsqrt(mean(x^2) + EPS) * norm_weight)
// for one row x [1, K] and weights gate and up [N, K].
// Grid: 32 * SIMDGROUPS threads for each threadgroup, enough of them for the N rows of a weight. Every threadgroup
// normalises x for itself into threadgroup memory; LANES lanes share ROWS gate rows and the same ROWS up rows.
// Bytes: both weights once, x and norm_weight (from cache) once for each threadgroup.
threadgroup uint4 staged[K / 8];
const uint lane = thread_index_in_simdgroup;
const int block = int(threadgroup_position_in_grid.x) * SIMDGROUPS + int(simdgroup_index_in_threadgroup);
const int first = first_row<ROWS, LANES>(block, lane);
const int row_lane = int(lane) % LANES;
int rows[ROWS];
clamp_rows<ROWS>(rows, first, N);
stage_norm<K, 32 * SIMDGROUPS>(staged, x, norm_weight, EPS, thread_index_in_threadgroup, lane);
threadgroup_barrier(mem_flags::mem_threadgroup);

float result[ROWS];
gate_up_rows<BITS, GROUP, K, ROWS, LANES>(
    result, staged, gate, scales_of<BITS, GROUP, K>(gate, N), biases_of<BITS, GROUP, K>(gate, N), up,
    scales_of<BITS, GROUP, K>(up, N), biases_of<BITS, GROUP, K>(up, N), rows, row_lane);
#pragma unroll
for (int i = 0; i < ROWS; ++i) {
  if (owns_row<LANES>(i, lane) && first + i < N) {
    hidden[first + i] = bfloat(result[i]);
  }
}
