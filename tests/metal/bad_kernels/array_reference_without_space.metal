// rejected, address-space: 'values' is a pointer or reference without
// helpers
inline float total(const float (&values)[4]) { // BAD
  return values[0] + values[1] + values[2] + values[3];
}
// body
const uint i = thread_position_in_grid.x;
float values[4] = {x[i], 1.0f, 2.0f, 3.0f};
out[i] = total(values);
