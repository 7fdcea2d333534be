// rejected, simd-uniform: depends on the thread
// helpers
// body
const uint i = thread_position_in_grid.x;
float total = 0.0f;
if (thread_index_in_simdgroup < 16) {
  total = simd_sum(x[i]); // BAD
}
out[i] = total;
