// rejected, left-out: a lambda
// helpers
// body
const uint i = thread_position_in_grid.x;
auto twice = [](float v) { return 2.0f * v; }; // BAD
out[i] = twice(x[i]);
