// rejected, language: typename
// helpers
template <typename T>
struct Box {
  using value = T;
};
template <typename B>
inline float first(B box, float v) {
  B::value copy = v; // BAD
  return copy;
}
// body
const uint i = thread_position_in_grid.x;
out[i] = first(Box<float>(), x[i]);
