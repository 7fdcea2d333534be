// token = the index of the largest best_value, ties to the lower index; next_position = position + 1.
//
// Grid: one threadgroup of 32 * SIMDGROUPS threads over the candidates. Bytes: 8 for each candidate.
const int parts = int(best_value_shape[0]);
threadgroup float group_values[SIMDGROUPS];
threadgroup uint group_indices[SIMDGROUPS];
float best = -INFINITY;
uint best_row = 0xffffffffu;
for (int i = int(thread_index_in_threadgroup); i < parts; i += 32 * SIMDGROUPS) {
  take_better(best, best_row, best_value[i], best_index[i]);
}
simd_best(best, best_row);
if (thread_index_in_simdgroup == 0) {
  group_values[simdgroup_index_in_threadgroup] = best;
  group_indices[simdgroup_index_in_threadgroup] = best_row;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index_in_threadgroup == 0) {
  for (int i = 1; i < SIMDGROUPS; ++i) {
    take_better(best, best_row, group_values[i], group_indices[i]);
  }
  token[0] = best_row;
  next_position[0] = position[0] + 1;
}
