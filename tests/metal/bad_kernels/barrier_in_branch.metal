// rejected, barrier-uniform: depends on the thread
// helpers
// body
const uint i = thread_position_in_grid.x;
if (thread_index_in_threadgroup < 32) {
  threadgroup_barrier(mem_flags::mem_threadgroup); // BAD
}
out[i] = x[i];
