// rejected, language: no matching function
// helpers
// body
const uint i = thread_position_in_grid.x;
threadgroup uint count[1];
if (thread_index_in_threadgroup == 0) {
  count[0] = 0;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
atomic_fetch_add_explicit(count, 1u, memory_order_relaxed); // BAD
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = float(count[0]);
