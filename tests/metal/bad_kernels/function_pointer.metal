// rejected, language: pointers to functions are not allowed
// helpers
inline float twice(float v) {
  return 2.0f * v;
}
// body
const uint i = thread_position_in_grid.x;
float (*f)(float) = twice; // BAD
out[i] = f(x[i]);
