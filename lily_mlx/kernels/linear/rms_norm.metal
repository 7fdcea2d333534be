// out[m, k] = bfloat16(x[m, k] * rsqrt(mean_k(x[m]^2) + EPS) * weight[k]), x [M, K].
//
// Grid: one threadgroup of 32 * SIMDGROUPS threads per row, which keeps the row in registers.
// Bytes: x and out once.
constexpr int THREADS = 32 * SIMDGROUPS;
constexpr int PIECES = (K / 8 + THREADS - 1) / THREADS;
threadgroup float scratch[SIMDGROUPS];
const int thread_id = int(thread_index_in_threadgroup);
const size_t row = size_t(threadgroup_position_in_grid.x);
const device uint4* source = (const device uint4*)(x + row * K);
const device uint4* gains_source = (const device uint4*)weight;
device uint4* target = (device uint4*)(out + row * K);
uint4 pieces[PIECES];
uint4 gain_pieces[PIECES];
#pragma unroll
for (int p = 0; p < PIECES; ++p) {
  const int piece = thread_id + THREADS * p;
  if (piece < K / 8) {
    pieces[p] = source[piece];
    gain_pieces[p] = gains_source[piece];
  }
}
float squares = 0.0f;
#pragma unroll
for (int p = 0; p < PIECES; ++p) {
  if (thread_id + THREADS * p < K / 8) {
    float values[8];
    unpack_eight(pieces[p], values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      squares = metal::fma(values[i], values[i], squares);
    }
  }
}
squares = threadgroup_sum<SIMDGROUPS>(squares, scratch, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const float scale = metal::precise::rsqrt(squares / float(K) + EPS);
#pragma unroll
for (int p = 0; p < PIECES; ++p) {
  const int piece = thread_id + THREADS * p;
  if (piece < K / 8) {
    float values[8];
    float gains[8];
    unpack_eight(pieces[p], values);
    unpack_eight(gain_pieces[p], gains);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = values[i] * scale * gains[i];
    }
    target[piece] = pack_eight(values);
  }
}
