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
  float weight[PER_LANE];
  float gate[PER_LANE];
  load_four<true>(y + size_t(row) * (HV * DV) + column, value);
  load_four<ALIGNED>(proj + size_t(row) * WIDTH + CHANNELS + column, gate);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    weight[i] = float(norm_weight[first + i]);
  }
  norm_and_gate<PER_LANE>(value, weight, gate, EPS);
  store_four(out + size_t(row) * (HV * DV) + column, value);
}
