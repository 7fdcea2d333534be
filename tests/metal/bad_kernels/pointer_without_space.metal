// rejected, address-space: 'p' is a pointer or reference without
// helpers
inline float load(const float* p) { // BAD
  return p[0];
}
// body
const uint i = thread_position_in_grid.x;
out[i] = load(x + i);
