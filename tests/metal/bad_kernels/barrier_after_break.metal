// rejected, barrier-uniform: depends on the thread
// helpers
// body
const uint i = thread_position_in_grid.x;
float total = 0.0f;
for (int j = 0; j < 4; ++j) {
  if (x[i] > float(j)) {
    break;
  }
  total += x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup); // BAD
}
out[i] = total;
