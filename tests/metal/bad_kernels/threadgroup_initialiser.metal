// rejected, threadgroup-declaration: cannot be declared
// helpers
// body
const uint i = thread_position_in_grid.x;
threadgroup float total = 0.0f; // BAD
out[i] = total;
