// rejected, language: threadgroup
// helpers
// body
const uint i = thread_position_in_grid.x;
threadgroup float tile[64];
tile[i % 64] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
const device float* p = tile; // BAD
out[i] = p[i % 64];
