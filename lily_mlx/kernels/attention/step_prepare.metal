// Decode: what attention needs from the joined projection of one token at `position`.
//
//   q[h] = rope(rms_norm(proj_q[h]) * q_norm)            rounded once to bfloat16
//   tail row `position % TAIL`: k = rope(rms_norm(proj_k) * k_norm), v = proj_v; older tail rows are copied
//
// Grid: one simdgroup per query head, then one per KV head and tail row; 4 simdgroups in a threadgroup. A simdgroup
// owns its row in q, or in tail_keys_out and tail_values_out. Rows after `position % TAIL` stay unwritten.
// Moves 4 * D * HKV bytes in and out for each older tail row, at most 2 x 262 KB for 2 KV heads of 256.
const uint lane = thread_index_in_simdgroup;
const int task = int(threadgroup_position_in_grid.x * 4 + simdgroup_index_in_threadgroup);
const int tail_row = position[0] % TAIL;
if (task < HQ) {
  norm_rope<D, R>(
      proj + task * 2 * D, q_norm, turns, uint(position[0]), lane, EPS, q + task * D);
} else if (task < HQ + HKV * TAIL) {
  const int head = (task - HQ) / TAIL;
  const int row = (task - HQ) % TAIL;
  const int offset = (head * TAIL + row) * D;
  if (row < tail_row) {
    copy_row<D>(tail_keys + offset, tail_keys_out + offset, lane);
    copy_row<D>(tail_values + offset, tail_values_out + offset, lane);
  } else if (row == tail_row) {
    norm_rope<D, R>(
        proj + (2 * HQ + head) * D, k_norm, turns, uint(position[0]), lane, EPS, tail_keys_out + offset);
    copy_row<D>(proj + (2 * HQ + HKV + head) * D, tail_values_out + offset, lane);
  }
}
