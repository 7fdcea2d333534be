// One head of D values held by the 32 lanes of a simdgroup: loading, copying, RMSNorm with rotary embedding.
// Needs the constant EPS only where norm_rope is used.
#ifndef LILY_ATTENTION_HEAD
#define LILY_ATTENTION_HEAD

// Values lane * E to lane * E + E of a row, as they are in memory: loads that may still be on their way.
template <int E>
struct LaneRow {
  uint4 words;                     // where E is 8
  bfloat values[E == 8 ? 1 : E];   // where it is not
};

// A row starts at a multiple of 16 bytes.
template <int E>
inline void start_lane(thread LaneRow<E>& loaded, const device bfloat* row, uint lane) {
  const device bfloat* own = row + lane * E;
  if (E == 8) {
    loaded.words = *(const device uint4*)own;
  } else {
#pragma unroll
    for (int i = 0; i < E; ++i) {
      loaded.values[E == 8 ? 0 : i] = own[i];
    }
  }
}

// Starts rows `first` to `first` + ROWS, the row before `end` in place of those from there on.
template <int D, int ROWS>
inline void start_rows(
    thread LaneRow<D / 32> (&loaded)[ROWS], const device bfloat* rows, int first, int end, uint lane) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    start_lane<D / 32>(loaded[r], rows + size_t(metal::min(first + r, end - 1)) * D, lane);
  }
}

// Eight values from 16 bytes.
inline void unpack_eight(uint4 words, thread float* values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = as_type<float>(words[i] << 16);
    values[2 * i + 1] = as_type<float>(words[i] & 0xffff0000u);
  }
}

template <int E>
inline void finish_lane(const thread LaneRow<E>& loaded, thread float (&values)[E]) {
  if (E == 8) {
    unpack_eight(loaded.words, values);
  } else {
#pragma unroll
    for (int i = 0; i < E; ++i) {
      values[i] = float(loaded.values[E == 8 ? 0 : i]);
    }
  }
}

// Values lane * E to lane * E + E of a row, in float.
template <int E>
inline void load_lane(const device bfloat* row, uint lane, thread float (&values)[E]) {
  LaneRow<E> loaded;
  start_lane<E>(loaded, row, lane);
  finish_lane<E>(loaded, values);
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

// values[i] = rope(rms_norm(row) * weight) at dimension 32 * i + lane, not rounded. The first R dimensions rotate: i
// with i + R / 2. All loads come before the sum, so that they are on their way together.
template <int D, int R>
inline void norm_rope(
    const device bfloat* row,
    const device bfloat* weight,
    const device uint* turns,
    uint position,
    uint lane,
    float eps,
    thread float (&values)[D / 32]) {
  float gains[D / 32];
  float others[D / 32];
  float other_gains[D / 32];
  float cosines[D / 32];
  float sines[D / 32];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const int dim = 32 * i + int(lane);
    values[i] = float(row[dim]);
    gains[i] = float(weight[dim]);
    if (dim < R) {
      const bool first = dim < R / 2;
      const int pair = first ? dim : dim - R / 2;
      const int partner = first ? dim + R / 2 : pair;
      others[i] = first ? -float(row[partner]) : float(row[partner]);
      other_gains[i] = float(weight[partner]);
      const float angle = rope_angle(turns[2 * pair], turns[2 * pair + 1], position);
      cosines[i] = metal::cos(angle);
      sines[i] = metal::sin(angle);
    }
    squares += values[i] * values[i];
  }
  const float scale = metal::precise::rsqrt(simd_sum(squares) / float(D) + eps);
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    values[i] = values[i] * scale * gains[i];
    if (32 * i + int(lane) < R) {
      values[i] = values[i] * cosines[i] + others[i] * scale * other_gains[i] * sines[i];
    }
  }
}

// Rounds and stores what norm_rope gives.
template <int D>
inline void store_head(const thread float (&values)[D / 32], uint lane, device bfloat* out) {
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    out[32 * i + int(lane)] = bfloat(values[i]);
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
