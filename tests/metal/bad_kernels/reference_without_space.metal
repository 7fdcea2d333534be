// rejected, address-space: 'total' is a pointer or reference without
// helpers
template <typename T>
inline void add(T& total, T value) { // BAD
  total += value;
}
// body
const uint i = thread_position_in_grid.x;
float total = 0.0f;
add(total, x[i]);
out[i] = total;
