// rejected, language: virtual functions are not supported
// helpers
struct Scale {
  virtual float apply(float v) thread { // BAD
    return 2.0f * v;
  }
};
// body
const uint i = thread_position_in_grid.x;
Scale s;
out[i] = s.apply(x[i]);
