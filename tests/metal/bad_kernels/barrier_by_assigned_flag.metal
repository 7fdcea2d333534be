// rejected, barrier-uniform: depends on the thread
// helpers
inline bool lane_is_odd(uint lane) {
  return lane % 2 == 1;
}
// body
const uint i = thread_position_in_grid.x;
bool flag = false;
if (lane_is_odd(thread_index_in_simdgroup)) {
  flag = true;
}
if (flag) {
  threadgroup_barrier(mem_flags::mem_threadgroup); // BAD
}
out[i] = x[i];
