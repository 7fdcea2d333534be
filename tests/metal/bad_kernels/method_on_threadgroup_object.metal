// rejected, method-space: not a threadgroup method
// helpers
struct Pair {
  float first;
  float second;
  float twice() const {
    return 2.0f * first;
  }
};
// body
const uint i = thread_position_in_grid.x;
threadgroup Pair pairs[64];
pairs[i % 64].first = x[i];
out[i] = pairs[i % 64].twice(); // BAD
