// rejected, language: threadgroup
// helpers
// body
const uint i = thread_position_in_grid.x;
threadgroup float tile[64];
tile[i % 64] = x[i];
out[i] = *(const device float*)tile; // BAD
