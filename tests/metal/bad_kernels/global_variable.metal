// rejected, global-variable: 'WIDTH' is not `constant`
// helpers
constexpr int WIDTH = 4; // BAD
// body
const uint i = thread_position_in_grid.x;
out[i] = x[i] * float(WIDTH);
