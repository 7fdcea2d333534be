// Prefill: queries and keys of a chunk from its joined projection.
//
//   q[m, h] = rope(rms_norm(proj_q[m, h]) * q_norm) at `position` + m, the same for k; rounded once to bfloat16
//
// Grid: one simdgroup per (token, query or KV head), 4 in a threadgroup. Moves 4 * D bytes per row.
const uint lane = thread_index_in_simdgroup;
const int task = int(threadgroup_position_in_grid.x * 4 + simdgroup_index_in_threadgroup);
const int token = task / (HQ + HKV);
const int head = task % (HQ + HKV);
if (token < proj_shape[0]) {
  const device bfloat* row = proj + size_t(token) * P;
  const uint row_position = uint(position[0] + token);
  float values[D / 32];
  if (head < HQ) {
    norm_rope<D, R>(row + head * 2 * D, q_norm, turns, row_position, lane, EPS, values);
    store_head<D>(values, lane, q + (size_t(token) * HQ + head) * D);
  } else {
    norm_rope<D, R>(row + (HQ + head) * D, k_norm, turns, row_position, lane, EPS, values);
    store_head<D>(values, lane, k + (size_t(token) * HKV + head - HQ) * D);
  }
}
