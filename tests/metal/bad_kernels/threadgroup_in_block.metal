// rejected, threadgroup-scope: inside a block
// helpers
// body
const uint i = thread_position_in_grid.x;
if (x_shape[0] > 4) {
  threadgroup float tile[64]; // BAD
  tile[i % 64] = x[i];
  out[i] = tile[i % 64];
}
