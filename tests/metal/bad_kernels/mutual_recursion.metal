// rejected, recursion: even calls itself
// helpers
inline bool odd(int n);
inline bool even(int n) { // BAD
  return n == 0 ? true : odd(n - 1);
}
inline bool odd(int n) {
  return n == 0 ? false : even(n - 1);
}
// body
const uint i = thread_position_in_grid.x;
out[i] = even(int(i)) ? 1.0f : 0.0f;
