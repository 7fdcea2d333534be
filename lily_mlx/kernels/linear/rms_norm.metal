// out[m, k] = bfloat16(x[m, k] * rsqrt(mean_k(x[m]^2) + EPS) * weight[k]), x [M, K].
//
// Grid: 32 * SIMDGROUPS threads for each threadgroup; one simdgroup owns one row.
// Bytes: x and out once (the second read of x comes from cache).
const uint lane = thread_index_in_simdgroup;
const int row = int(threadgroup_position_in_grid.x) * SIMDGROUPS + int(simdgroup_index_in_threadgroup);
if (row < int(x_shape[0])) {
  const device uint4* source = (const device uint4*)(x + size_t(row) * K);
  const device uint4* gains_source = (const device uint4*)weight;
  device uint4* target = (device uint4*)(out + size_t(row) * K);
  float squares = 0.0f;
  for (int piece = int(lane); piece < K / 8; piece += 32) {
    float values[8];
    unpack_eight(source[piece], values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      squares = metal::fma(values[i], values[i], squares);
    }
  }
  const float scale = metal::precise::rsqrt(simd_sum(squares) / float(K) + EPS);
  for (int piece = int(lane); piece < K / 8; piece += 32) {
    float values[8];
    float gains[8];
    unpack_eight(source[piece], values);
    unpack_eight(gains_source[piece], gains);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = values[i] * scale * gains[i];
    }
    target[piece] = pack_eight(values);
  }
}
