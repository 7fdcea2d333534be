// Vectors that a threadgroup computes before its matrix-vector product, staged as bfloat16 in threadgroup
// memory. Needs quantized.h before it. Every thread of the threadgroup calls; the caller puts a
// threadgroup_barrier between these and the first read.

// staged = bfloat16(x * rsqrt(mean(x^2) + eps) * weight), K values.
// Each simdgroup sums the squares of the whole row by itself, which saves a barrier; the threads then share
// the writing.
template <int K, int THREADS>
inline void stage_norm(
    threadgroup uint4* staged,
    const device bfloat* x,
    const device bfloat* weight,
    float eps,
    uint thread_id,
    uint lane) {
  const device uint4* x_pieces = (const device uint4*)x;
  const device uint4* weight_pieces = (const device uint4*)weight;
  float squares = 0.0f;
  for (int piece = int(lane); piece < K / 8; piece += 32) {
    float values[8];
    unpack_eight(x_pieces[piece], values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      squares = metal::fma(values[i], values[i], squares);
    }
  }
  float scale = metal::precise::rsqrt(simd_sum(squares) / float(K) + eps);
  for (int piece = int(thread_id); piece < K / 8; piece += THREADS) {
    float values[8];
    float gains[8];
    unpack_eight(x_pieces[piece], values);
    unpack_eight(weight_pieces[piece], gains);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = values[i] * scale * gains[i];
    }
    store_staged(staged, piece / 4, piece % 4, values);
  }
}

// staged = bfloat16(norm(y) * weight * silu(z)), where norm is an RMSNorm over each of the K / HEAD heads.
// HEAD / 8 adjacent lanes hold a head, so HEAD is a power of two from 8 to 256.
template <int HEAD, int K, int THREADS>
inline void stage_gated_norm(
    threadgroup uint4* staged,
    const device bfloat* y,
    const device bfloat* z,
    const device bfloat* weight,
    float eps,
    uint thread_id) {
  const device uint4* y_pieces = (const device uint4*)y;
  const device uint4* z_pieces = (const device uint4*)z;
  const device uint4* weight_pieces = (const device uint4*)weight;
  for (int start = 0; start < K / 8; start += THREADS) {
    int piece = start + int(thread_id);
    bool inside = piece < K / 8;
    float values[8];
    float squares = 0.0f;
    uint4 packed = uint4(0u);
    if (inside) {
      packed = y_pieces[piece];
    }
    unpack_eight(packed, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      squares = metal::fma(values[i], values[i], squares);
    }
    float scale = metal::precise::rsqrt(lanes_sum<HEAD / 8>(squares) / float(HEAD) + eps);
    if (inside) {
      float gates[8];
      float gains[8];
      unpack_eight(z_pieces[piece], gates);
      unpack_eight(weight_pieces[piece % (HEAD / 8)], gains);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float silu = gates[i] / (1.0f + metal::precise::exp(-gates[i]));
        values[i] = values[i] * scale * gains[i] * silu;
      }
      store_staged(staged, piece / 4, piece % 4, values);
    }
  }
}
