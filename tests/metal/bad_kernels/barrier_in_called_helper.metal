// rejected, barrier-uniform: depends on the thread
// helpers
inline float after_barrier(threadgroup float* tile, uint index) {
  threadgroup_barrier(mem_flags::mem_threadgroup); // BAD
  return tile[index];
}
// body
const uint i = thread_position_in_grid.x;
threadgroup float tile[64];
tile[i % 64] = x[i];
if (x[i] > 0.0f) {
  out[i] = after_barrier(tile, i % 64);
}
