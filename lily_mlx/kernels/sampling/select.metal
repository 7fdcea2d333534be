// token = the index of the largest best_value, ties to the lower index; next_position = position + 1.
//
// Grid: one threadgroup of 32 * SIMDGROUPS threads over the candidates of each sequence, one sequence after another in
// all arrays. Bytes: 8 for each candidate.
const int sequence = int(threadgroup_position_in_grid.x);
const int parts = int(best_value_shape[0]) / int(threadgroups_per_grid.x);
threadgroup float group_values[SIMDGROUPS];
threadgroup uint group_indices[SIMDGROUPS];
float best = -INFINITY;
uint best_row = 0xffffffffu;
for (int i = int(thread_index_in_threadgroup); i < parts; i += 32 * SIMDGROUPS) {
  take_better(best, best_row, best_value[sequence * parts + i], best_index[sequence * parts + i]);
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
  token[sequence] = best_row;
  next_position[sequence] = position[sequence] + 1;
}
