// rejected, language: no member named 'erf'
// helpers
// body
const uint i = thread_position_in_grid.x;
out[i] = metal::erf(x[i]); // BAD
