// rejected, shuffle-bfloat: not bfloat
// helpers
template <typename T>
inline T neighbour(T value) {
  return simd_shuffle_down(value, ushort(1)); // BAD
}
// body
const uint i = thread_position_in_grid.x;
out[i] = float(neighbour(w[i]));
