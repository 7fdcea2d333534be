// A lane's dimensions of a row, and sums over lanes, for attention_parts.metal.

// Values lane * E to lane * E + E of a row that starts at a multiple of 16 bytes.
template <bool COALESCED, int E>
inline void load_dims(const device bfloat* row, uint lane, thread float (&values)[E]) {
  const device bfloat* own = row + lane * E;
  if (COALESCED && E % 8 == 0) {
#pragma unroll
    for (int i = 0; i < E / 8; ++i) {
      const uint4 words = *(const device uint4*)(own + 8 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[8 * i + 2 * j] = as_type<float>(words[j] << 16);
        values[8 * i + 2 * j + 1] = as_type<float>(words[j] & 0xffff0000u);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < E; ++i) {
      values[i] = float(own[i]);
    }
  }
}

// One halving of sum_each: lanes exchange the half of `v` that they do not keep.
template <int HALF>
inline void halve(thread float (&v)[32], uint lane) {
  const bool upper = (lane & uint(HALF)) != 0;
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float keep = upper ? v[i + HALF] : v[i];
    const float send = upper ? v[i] : v[i + HALF];
    v[i] = keep + simd_shuffle_xor(send, ushort(HALF));
  }
}

// 32 sums over the lanes at once: lane i returns the sum of v[i].
inline float sum_each(thread float (&v)[32], uint lane) {
  halve<16>(v, lane);
  halve<8>(v, lane);
  halve<4>(v, lane);
  halve<2>(v, lane);
  halve<1>(v, lane);
  return v[0];
}
