// rejected, double: Metal has no double
// helpers
// body
const uint i = thread_position_in_grid.x;
double wide = x[i]; // BAD
out[i] = float(wide);
