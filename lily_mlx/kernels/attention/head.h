// One head of D values held by the 32 lanes of a simdgroup: loading, copying, RMSNorm with rotary embedding.
// Needs the constant EPS only where norm_rope is used.
#ifndef LILY_ATTENTION_HEAD
#define LILY_ATTENTION_HEAD

// Values lane * E to lane * E + E of a row, in float. A row starts at a multiple of 16 bytes.
template <int E>
inline void load_lane(const device bfloat* row, uint lane, thread float (&values)[E]) {
  const device bfloat* own = row + lane * E;
  if (E % 8 == 0) {
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

// Copies one row of D values, 16 bytes at a time.
template <int D>
inline void copy_row(const device bfloat* from, device bfloat* to, uint lane) {
  for (int i = int(lane); i < D / 8; i += 32) {
    ((device uint4*)to)[i] = ((const device uint4*)from)[i];
  }
}

// The rotary angle in [-pi, pi). high:low is the pair's turn per position in 64-bit fixed point, so whole turns
// vanish in the overflow of the product.
inline float rope_angle(uint high, uint low, uint position) {
  const uint turn = high * position + uint((ulong(low) * ulong(position)) >> 32);
  return float(as_type<int>(turn)) * 1.4629180792671596e-09f; // 2 pi / 2^32
}

// out = rope(rms_norm(row) * weight), rounded once. The first R dimensions rotate: i with i + R / 2.
template <int D, int R>
inline void norm_rope(
    const device bfloat* row,
    const device bfloat* weight,
    const device uint* turns,
    uint position,
    uint lane,
    float eps,
    device bfloat* out) {
  float values[D / 32];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    values[i] = float(row[32 * i + int(lane)]);
    squares += values[i] * values[i];
  }
  const float scale = metal::precise::rsqrt(simd_sum(squares) / float(D) + eps);
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const int dim = 32 * i + int(lane);
    float value = values[i] * scale * float(weight[dim]);
    if (dim < R) {
      const bool first = dim < R / 2;
      const int pair = first ? dim : dim - R / 2;
      const int partner = first ? dim + R / 2 : pair;
      const float other = float(row[partner]) * scale * float(weight[partner]);
      const float angle = rope_angle(turns[2 * pair], turns[2 * pair + 1], position);
      const float sine = metal::sin(angle);
      value = value * metal::cos(angle) + (first ? -other : other) * sine;
    }
    out[dim] = bfloat(value);
  }
}

// One halving of simd_sum_each: the lower half of `v` takes over the lanes' partners.
template <int HALF>
inline void fold_lanes(thread float (&v)[32], uint lane) {
  const bool upper = (lane & uint(HALF)) != 0;
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float keep = upper ? v[i + HALF] : v[i];
    const float send = upper ? v[i] : v[i + HALF];
    v[i] = keep + simd_shuffle_xor(send, ushort(HALF));
  }
}

// v[i] summed over the lanes, for 32 values at once: lane i returns the sum of v[i]. 31 shuffles instead of 160.
inline float simd_sum_each(thread float (&v)[32], uint lane) {
  fold_lanes<16>(v, lane);
  fold_lanes<8>(v, lane);
  fold_lanes<4>(v, lane);
  fold_lanes<2>(v, lane);
  fold_lanes<1>(v, lane);
  return v[0];
}
#endif
