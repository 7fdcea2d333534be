// rejected, language: read-only variable is not assignable
// helpers
// body
const uint i = thread_position_in_grid.x;
x[i] = 1.0f; // BAD
out[i] = x[i];
