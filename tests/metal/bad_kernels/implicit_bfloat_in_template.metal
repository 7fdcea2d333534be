// rejected, bfloat-conversion: implicit conversion
// helpers
template <typename T>
inline T scaled(T value, float factor) {
  return value * factor; // BAD
}
// body
const uint i = thread_position_in_grid.x;
out[i] = float(scaled(w[i], x[i]));
