// rejected, recursion: sum_to calls itself
// helpers
inline float sum_to(int n) { // BAD
  return n == 0 ? 0.0f : float(n) + sum_to(n - 1);
}
// body
const uint i = thread_position_in_grid.x;
out[i] = sum_to(int(i));
