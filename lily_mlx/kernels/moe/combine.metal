// Prefill: weighted sum of each token's expert rows.
//   out[m, h] = bfloat(residual[m, h] + sum over slots s of scores[m, s] * outputs[row(m, s), h])
// row(m, s) = slot_rows[m, s], and S + m for the shared expert (slot TOP_K). float32, slots added in order, one rounding.
// Grid: (tokens, blocks of columns), 8 columns for each thread of a threadgroup. Bytes: 2 (TOP_K + 3) H per token.
const int width = int(residual_shape[1]);
const int piece = int(threadgroup_position_in_grid.y * threads_per_threadgroup.x + thread_index_in_threadgroup);
const uint token = threadgroup_position_in_grid.x;
if (piece < width / 8) {
  uint rows[TOP_K + 1];
  float weights[TOP_K + 1];
  for (int slot = 0; slot <= TOP_K; ++slot) {
    rows[slot] = uint(residual_shape[0]) * uint(TOP_K) + token;
    if (slot < TOP_K) {
      rows[slot] = slot_rows[token * uint(TOP_K) + uint(slot)];
    }
    weights[slot] = scores[token * uint(TOP_K + 1) + uint(slot)];
  }
  float values[8];
  combine_eight<TOP_K + 1>(values, outputs, residual, rows, weights, token, width, piece);
  ((device uint4*)(out + size_t(token) * width))[piece] = pack_eight(values);
}
