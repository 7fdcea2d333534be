// rejected, language: exceptions disabled
// helpers
// body
const uint i = thread_position_in_grid.x;
if (x[i] < 0.0f) {
  throw 1; // BAD
}
out[i] = x[i];
