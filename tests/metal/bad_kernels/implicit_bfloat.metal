// rejected, bfloat-conversion: implicit conversion
// helpers
// body
const uint i = thread_position_in_grid.x;
const bfloat half_of = 0.5f * x[i]; // BAD
out[i] = float(half_of);
