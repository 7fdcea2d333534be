// rejected, language: no matching function
// helpers
inline float load(const threadgroup float* p) {
  return p[0];
}
// body
const uint i = thread_position_in_grid.x;
out[i] = load(x + i); // BAD
