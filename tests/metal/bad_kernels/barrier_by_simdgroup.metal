// rejected, barrier-uniform: depends on the simdgroup
// helpers
// body
const uint i = thread_position_in_grid.x;
if (simdgroup_index_in_threadgroup == 0) {
  threadgroup_barrier(mem_flags::mem_threadgroup); // BAD
}
out[i] = x[i];
