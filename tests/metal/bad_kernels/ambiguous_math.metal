// rejected, language: ambiguous
// helpers
// body
const uint i = thread_position_in_grid.x;
out[i] = metal::exp2(int(i)); // BAD
