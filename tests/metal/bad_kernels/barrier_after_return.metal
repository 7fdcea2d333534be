// rejected, barrier-uniform: depends on the thread
// helpers
// body
const uint i = thread_position_in_grid.x;
if (i >= uint(x_shape[0])) {
  return;
}
threadgroup_barrier(mem_flags::mem_threadgroup); // BAD
out[i] = x[i];
