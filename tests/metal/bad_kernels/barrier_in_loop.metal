// rejected, barrier-uniform: depends on the thread
// helpers
// body
const uint i = thread_position_in_grid.x;
float total = 0.0f;
for (uint j = thread_index_in_threadgroup; j < 100; j += 64) {
  total += x[j % 64];
  threadgroup_barrier(mem_flags::mem_threadgroup); // BAD
}
out[i] = total;
