// rejected, simd-uniform: simdgroup_load
// helpers
// body
const uint i = thread_position_in_grid.x;
threadgroup float tile[64];
tile[i % 64] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
simdgroup_matrix<float, 8, 8> m;
if (x[i] > 0.0f) {
  simdgroup_load(m, tile, 8); // BAD
}
out[i] = m.thread_elements()[0];
