// rejected, buffers: 32 buffers
// inputs: 28
// helpers
// body
const uint i = thread_position_in_grid.x;
out[i] = x[i];
