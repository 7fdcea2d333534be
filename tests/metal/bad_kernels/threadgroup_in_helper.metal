// rejected, threadgroup-scope: declared in first
// helpers
inline float first(float v, uint index) {
  threadgroup float shared[1]; // BAD
  if (index == 0) {
    shared[0] = v;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return shared[0];
}
// body
const uint i = thread_position_in_grid.x;
out[i] = first(x[i], thread_index_in_threadgroup);
