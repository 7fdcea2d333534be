// Prefill: RMSNorm of each value head, gated by z.
//   out[m, h, d] = bfloat(y[m, h, d] * rsqrt(mean over d of y^2 + EPS) * norm_weight[d] * silu(z[m, h, d]))
// z is the part of the projection after the convolution's channels. float32, one rounding.
// Grid: one simdgroup per row and head, 4 neighbouring values per lane. Bytes: 6 HV DV per row.
constexpr int PER_LANE = 4;
constexpr int CHANNELS = 2 * HK * DK + HV * DV;
constexpr int WIDTH = CHANNELS + HV * DV + 2 * HV;
constexpr bool ALIGNED = WIDTH % 4 == 0;
static_assert(DV == 32 * PER_LANE, "a head is one simdgroup of 4 values per lane");

const int rows = int(y_shape[0]);
const int unit = int(threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup);
const int row = unit / HV;
const int first = int(thread_index_in_simdgroup) * PER_LANE;
if (row < rows) {
  const int column = (unit % HV) * DV + first;
  float value[PER_LANE];
  float gate[PER_LANE];
  load_four<true>(y + size_t(row) * (HV * DV) + column, value);
  load_four<ALIGNED>(proj + size_t(row) * WIDTH + CHANNELS + column, gate);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    squares = metal::fma(value[i], value[i], squares);
  }
  const float inverse = metal::precise::rsqrt(simd_sum(squares) / float(DV) + EPS);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    value[i] = value[i] * inverse * float(norm_weight[first + i]) * silu(gate[i]);
  }
  store_four(out + size_t(row) * (HV * DV) + column, value);
}
