// rejected, threadgroup-memory: threadgroup memory
// helpers
// body
const uint i = thread_position_in_grid.x;
threadgroup float tile[8000];
threadgroup bfloat other[400];
tile[i] = x[i];
other[i] = w[i];
out[i] = tile[i];
