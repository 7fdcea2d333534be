// rejected, global-variable: not `constant`
// helpers
// body
const uint i = thread_position_in_grid.x;
static constexpr int table[2] = {1, 2}; // BAD
out[i] = float(table[i % 2]);
