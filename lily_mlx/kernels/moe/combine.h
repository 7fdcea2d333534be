// Eight columns of a token's new residual. Needs quantized.h before it.

// values = residual + sum over slots s of scores[s] * outputs[rows[s]], in float32, slots added in order.
template <int SLOTS>
inline void combine_eight(
    thread float (&values)[8],
    const device bfloat* outputs,
    const device bfloat* residual,
    const thread uint (&rows)[SLOTS],
    const thread float (&scores)[SLOTS],
    uint token,
    int width,
    int piece) {
  uint4 pieces[SLOTS];
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) {
    pieces[slot] = ((const device uint4*)(outputs + size_t(rows[slot]) * width))[piece];
  }
  float total[8];
  for (int i = 0; i < 8; ++i) {
    total[i] = 0.0f;
  }
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) {
    unpack_eight(pieces[slot], values);
    for (int i = 0; i < 8; ++i) {
      total[i] = metal::fma(scores[slot], values[i], total[i]);
    }
  }
  unpack_eight(((const device uint4*)(residual + size_t(token) * width))[piece], values);
  for (int i = 0; i < 8; ++i) {
    values[i] += total[i];
  }
}
