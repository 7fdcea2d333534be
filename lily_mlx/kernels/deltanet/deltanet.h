// What the phases of a Gated DeltaNet layer share: loads of bfloat16, activations, gates, the delta rule.
// Decode and prefill call the same functions, so that they round at the same points.
#ifndef LILY_DELTANET
#define LILY_DELTANET

// Added to the sum of squares of a query or key (mlx_lm.models.gated_delta.normalize_qk).
constant constexpr float L2_EPS = 1e-6f;

// ---- bfloat16 ------------------------------------------------------------------------------------------

inline float low_bfloat(uint pair) {
  return as_type<float>(pair << 16);
}

inline float high_bfloat(uint pair) {
  return as_type<float>(pair & 0xffff0000u);
}

inline uint bfloat_bits(float value) {
  return uint(as_type<ushort>(bfloat(value)));
}

// The nearest bfloat16. It passes through an integer, so that no compiler keeps the unrounded value.
inline float round_to_bfloat(float value) {
  return as_type<float>(bfloat_bits(value) << 16);
}

inline void unpack_four_bfloats(uint2 packed, thread float* values) {
  values[0] = low_bfloat(packed.x);
  values[1] = high_bfloat(packed.x);
  values[2] = low_bfloat(packed.y);
  values[3] = high_bfloat(packed.y);
}

inline void unpack_eight_bfloats(uint4 packed, thread float* values) {
  unpack_four_bfloats(uint2(packed.x, packed.y), values);
  unpack_four_bfloats(uint2(packed.z, packed.w), values + 4);
}

// Four values, rounded.
inline uint2 pack_four_bfloats(const thread float* values) {
  const uint low = bfloat_bits(values[0]) | (bfloat_bits(values[1]) << 16);
  const uint high = bfloat_bits(values[2]) | (bfloat_bits(values[3]) << 16);
  return uint2(low, high);
}

// Four values. Rows of the projection start at a multiple of 8 bytes only if ALIGNED, else of 4.
template <bool ALIGNED>
inline uint2 load_four_packed(const device bfloat* source) {
  if (ALIGNED) {
    return *(const device uint2*)source;
  }
  return uint2(((const device uint*)source)[0], ((const device uint*)source)[1]);
}

template <bool ALIGNED>
inline void load_four(const device bfloat* source, thread float* values) {
  unpack_four_bfloats(load_four_packed<ALIGNED>(source), values);
}

// Four values, rounded, to an address that is a multiple of 8 bytes.
inline void store_four(device bfloat* target, const thread float* values) {
  *(device uint2*)target = pack_four_bfloats(values);
}

// ---- activations and gates -----------------------------------------------------------------------------

inline float sigmoid(float x) {
  return 1.0f / (1.0f + metal::exp(-x));
}

inline float silu(float x) {
  return x * sigmoid(x);
}

// log(1 + exp(x)). Dividing by (1 + e) - 1, the e that survived the addition, cancels its rounding error,
// so the result is right to float32 even where exp(x) is tiny.
inline float softplus(float x) {
  const float e = metal::exp(-metal::abs(x));
  const float sum = 1.0f + e;
  const float log_sum = sum == 1.0f ? e : metal::log(sum) * (e / (sum - 1.0f));
  return metal::max(x, 0.0f) + log_sum;
}

// Factor in (0, 1] by which a head forgets its state at one token.
inline float decay_gate(float a, float a_log, float dt_bias) {
  return metal::exp(-metal::exp(a_log) * softplus(a + dt_bias));
}

// ---- convolution and norms -----------------------------------------------------------------------------

// Input `row` of the convolution. The rows before a chunk, -1 to 1 - CONV, are in the window that it starts with.
template <int CONV, int CHANNELS, int WIDTH>
inline const device bfloat* input_row(const device bfloat* proj, const device bfloat* conv_state, int row) {
  return row < 0 ? conv_state + (row + CONV - 1) * CHANNELS : proj + size_t(row) * WIDTH;
}

// Causal convolution with SiLU of COUNT neighbouring channels, whose CONV newest inputs are the window.
template <int CONV, int COUNT>
inline void convolve(
    const thread float (&weight)[CONV][COUNT], const thread float (&window)[CONV][COUNT],
    thread float (&value)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    float sum = 0.0f;
#pragma unroll
    for (int tap = 0; tap < CONV; ++tap) {
      sum = metal::fma(weight[tap][i], window[tap][i], sum);
    }
    value[i] = silu(sum);
  }
}

// 1 / |x| for a vector spread over a simdgroup, COUNT values in each lane. Called by whole simdgroups.
template <int COUNT>
inline float inverse_length(const thread float* values) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    squares = metal::fma(values[i], values[i], squares);
  }
  return metal::precise::rsqrt(simd_sum(squares) + L2_EPS);
}

// Scales a normalised vector and rounds it to bfloat16.
template <int COUNT>
inline void scale_and_round(thread float* values, float factor) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    values[i] = round_to_bfloat(values[i] * factor);
  }
}

// RMSNorm of a vector spread over a simdgroup, COUNT values in each lane, times its weight and silu(gate).
template <int COUNT>
inline void norm_and_gate(
    thread float (&values)[COUNT], const thread float (&weight)[COUNT], const thread float (&gate)[COUNT], float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    squares = metal::fma(values[i], values[i], squares);
  }
  const float inverse = metal::precise::rsqrt(simd_sum(squares) / float(32 * COUNT) + eps);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    values[i] = values[i] * inverse * weight[i] * silu(gate[i]);
  }
}

// ---- the delta rule ------------------------------------------------------------------------------------

// A lane's part of COLUMNS columns of a head's state: the LANES lanes of a column take pieces of PIECE keys in turn.
// A column is a row of DK floats in memory; `state` is where the first one starts.
template <int PIECE, int LANES, int DK, int KEYS, int COLUMNS>
inline void load_columns(const device float* state, int lane_in_group, thread float (&columns)[COLUMNS][KEYS]) {
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
    for (int i = 0; i < KEYS; i += 4) {
      const int key = (i / PIECE * LANES + lane_in_group) * PIECE + i % PIECE;
      const float4 packed = *(const device float4*)(state + c * DK + key);
      columns[c][i] = packed.x;
      columns[c][i + 1] = packed.y;
      columns[c][i + 2] = packed.z;
      columns[c][i + 3] = packed.w;
    }
  }
}

template <int PIECE, int LANES, int DK, int KEYS, int COLUMNS>
inline void store_columns(device float* state, int lane_in_group, const thread float (&columns)[COLUMNS][KEYS]) {
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
    for (int i = 0; i < KEYS; i += 4) {
      const int key = (i / PIECE * LANES + lane_in_group) * PIECE + i % PIECE;
      *(device float4*)(state + c * DK + key) =
          float4(columns[c][i], columns[c][i + 1], columns[c][i + 2], columns[c][i + 3]);
    }
  }
}

// The same keys of a query or key in threadgroup memory. PIECE is 4 or 8.
template <int PIECE, int LANES, int KEYS>
inline void load_keys(const threadgroup uint4* vector, int lane_in_group, thread float (&keys)[KEYS]) {
#pragma unroll
  for (int i = 0; i < KEYS; i += PIECE) {
    const int piece = i / PIECE * LANES + lane_in_group;
    if (PIECE == 8) {
      unpack_eight_bfloats(vector[piece], &keys[i]);
    } else {
      unpack_four_bfloats(((const threadgroup uint2*)vector)[piece], &keys[i]);
    }
  }
}

// Sums COUNT values over the LANES neighbouring lanes that share columns; each lane gets the same bits.
// The values go through each distance together, so that their shuffles overlap.
template <int LANES, int COUNT>
inline void sum_over_lanes(thread float (&values)[COUNT]) {
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      values[i] += simd_shuffle_xor(values[i], ushort(distance));
    }
  }
}

// One token for COLUMNS columns of a head's state, KEYS of their rows in this lane:
//   S <- decay S;  delta = beta (v - S k);  out = S q + delta (k q);  S <- S + k delta
// out is the updated state's product with q, written so that all sums over lanes are taken at once: their
// latency is what a token costs. Multiply-adds are explicit, so that a token's result does not depend on
// its place in a chunk.
template <int LANES, int KEYS, int COLUMNS>
inline void delta_rule(
    thread float (&state)[COLUMNS][KEYS], const thread float (&q)[KEYS], const thread float (&k)[KEYS],
    const thread float (&v)[COLUMNS], float decay, float beta, thread float (&out)[COLUMNS]) {
  float sums[2 * COLUMNS + 1];  // S k and S q of each column, k q
  sums[2 * COLUMNS] = 0.0f;
#pragma unroll
  for (int i = 0; i < KEYS; ++i) {
    sums[2 * COLUMNS] = metal::fma(k[i], q[i], sums[2 * COLUMNS]);
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    float state_k[2] = {0.0f, 0.0f};
    float state_q[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      state[c][i] *= decay;
      state_k[i % 2] = metal::fma(state[c][i], k[i], state_k[i % 2]);
      state_q[i % 2] = metal::fma(state[c][i], q[i], state_q[i % 2]);
    }
    sums[2 * c] = state_k[0] + state_k[1];
    sums[2 * c + 1] = state_q[0] + state_q[1];
  }
  sum_over_lanes<LANES>(sums);
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const float delta = beta * (v[c] - sums[2 * c]);
    out[c] = metal::fma(delta, sums[2 * COLUMNS], sums[2 * c + 1]);
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      state[c][i] = metal::fma(k[i], delta, state[c][i]);
    }
  }
}

#endif
