// Prefill: weighted sum of each token's expert rows, and the RMSNorm of it that the next layer starts with.
//   out[m, h] = bfloat(residual[m, h] + sum over slots s of scores[m, s] * outputs[row(m, s), h])
//   normed[m, h] = bfloat(out[m, h] * rsqrt(mean_h(out[m]^2) + EPS) * norm_weight[h])
// row(m, s) = slot_rows[m, s], and S + m for the shared expert (slot TOP_K). float32, slots added in order.
// Grid: one threadgroup of 32 * SIMDGROUPS threads per token, 8 columns for each thread at a time.
// Bytes: 2 (TOP_K + 4) H per token.
constexpr int THREADS = 32 * SIMDGROUPS;
constexpr int PIECES = (H / 8 + THREADS - 1) / THREADS;
threadgroup float scratch[SIMDGROUPS];
const int thread_id = int(thread_index_in_threadgroup);
const uint token = threadgroup_position_in_grid.x;
uint rows[TOP_K + 1];
float weights[TOP_K + 1];
for (int slot = 0; slot <= TOP_K; ++slot) {
  rows[slot] = uint(residual_shape[0]) * uint(TOP_K) + token;
  if (slot < TOP_K) {
    rows[slot] = slot_rows[token * uint(TOP_K) + uint(slot)];
  }
  weights[slot] = scores[token * uint(TOP_K + 1) + uint(slot)];
}
float values[PIECES][8];
float squares = 0.0f;
#pragma unroll
for (int p = 0; p < PIECES; ++p) {
  const int piece = thread_id + THREADS * p;
  if (piece < H / 8) {
    combine_eight<TOP_K + 1>(values[p], outputs, residual, rows, weights, token, H, piece);
    const uint4 rounded = pack_eight(values[p]);
    ((device uint4*)(out + size_t(token) * H))[piece] = rounded;
    unpack_eight(rounded, values[p]);
    for (int i = 0; i < 8; ++i) {
      squares = metal::fma(values[p][i], values[p][i], squares);
    }
  }
}
squares = threadgroup_sum<SIMDGROUPS>(squares, scratch, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const float inverse = metal::precise::rsqrt(squares / float(H) + EPS);
#pragma unroll
for (int p = 0; p < PIECES; ++p) {
  const int piece = thread_id + THREADS * p;
  if (piece < H / 8) {
    float gains[8];
    unpack_eight(((const device uint4*)norm_weight)[piece], gains);
    for (int i = 0; i < 8; ++i) {
      values[p][i] = values[p][i] * inverse * gains[i];
    }
    ((device uint4*)(normed + size_t(token) * H))[piece] = pack_eight(values[p]);
  }
}
