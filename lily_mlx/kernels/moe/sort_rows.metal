// Stable counting sort of the S = M * top_k (token, slot) pairs by expert, pairs of one expert in token order:
//   offsets[e] = number of pairs with an expert < e (offsets[E] = S);
//   pair p of expert e goes to row offsets[e] + (pairs of e before p); row_tokens[row] = p / top_k; slot_rows[p] = row.
// Grid: one threadgroup per expert, of at most 1,024 threads. Its simdgroups own consecutive segments of the pairs, so the order needs no atomics
// and skew (all pairs to one expert) costs no more than an even spread.
// First pass: count smaller and equal ids. Second pass: place the equal ones by a prefix sum over each 32 of them.
// Bytes: 8 S read per expert (from cache), 8 S written in all.
threadgroup uint smaller_counts[32];
threadgroup uint equal_counts[32];
const uint lane = thread_index_in_simdgroup;
const uint simd_group = simdgroup_index_in_threadgroup;
const uint simdgroups = threads_per_threadgroup.x / 32u;
const uint expert = threadgroup_position_in_grid.x;
const uint top_k = uint(experts_shape[1]);
const uint pairs = uint(experts_shape[0]) * top_k;
const uint segment = (pairs + 32u * simdgroups - 1u) / (32u * simdgroups) * 32u;
const uint begin = metal::min(simd_group * segment, pairs);
const uint end = metal::min(begin + segment, pairs);

uint smaller = 0u;
uint equal = 0u;
for (uint p = begin + lane; p < end; p += 32u) {
  const uint id = experts[p];
  smaller += id < expert ? 1u : 0u;
  equal += id == expert ? 1u : 0u;
}
smaller = simd_sum(smaller);
equal = simd_sum(equal);
if (lane == 0u) {
  smaller_counts[simd_group] = smaller;
  equal_counts[simd_group] = equal;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

uint offset = 0u;
uint next = 0u;
for (uint s = 0u; s < simdgroups; ++s) {
  offset += smaller_counts[s];
  next += s < simd_group ? equal_counts[s] : 0u;
}
next += offset;
if (thread_index_in_threadgroup == 0u) {
  offsets[expert] = offset;
  if (expert + 1u == threadgroups_per_grid.x) {
    offsets[expert + 1u] = pairs;
  }
}

for (uint base = begin; base < end; base += 32u) {
  const uint p = base + lane;
  bool mine = false;
  if (p < end) {
    mine = experts[p] == expert;
  }
  if (simd_any(mine)) {
    const uint before = simd_prefix_exclusive_sum(mine ? 1u : 0u);
    if (mine) {
      row_tokens[next + before] = p / top_k;
      slot_rows[p] = next + before;
    }
    next += simd_sum(mine ? 1u : 0u);
  }
}
