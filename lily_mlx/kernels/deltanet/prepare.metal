// Prefill: convolution, normalisation and gates of M rows.
//   x[m, c] = silu(sum over taps t of conv_weight[t, c] * window[m + t, c]), window = [conv_state; proj]
//   q = x_q / sqrt(DK |x_q|^2), k = x_k / |x_k|, v = x_v          (bfloat16, |x| with L2_EPS)
//   decay = exp(-exp(a_log) softplus(a + dt_bias)), beta = sigmoid(b)          (float32)
//   next_conv_state = the last CONV - 1 rows of the window
// Grid: (units of a row, tiles of ROWS rows), SIMDGROUPS units to a threadgroup. A unit is one simdgroup: a head
// of q, of k or of v, each lane with PER_LANE neighbouring channels and a sliding window in registers, or
// the gates of 32 heads. The simdgroup that meets the last row writes its channels of next_conv_state.
// Bytes: 4 C + 12 HV per row, and CONV - 1 rows again for each tile.
constexpr int PER_LANE = 4;
constexpr int CHANNELS = 2 * HK * DK + HV * DV;
constexpr int WIDTH = CHANNELS + HV * DV + 2 * HV;
constexpr int B_OFFSET = CHANNELS + HV * DV;
constexpr int A_OFFSET = B_OFFSET + HV;
constexpr int HEADS = 2 * HK + HV;
constexpr bool ALIGNED = WIDTH % 4 == 0;
static_assert(DK == 32 * PER_LANE && DV == 32 * PER_LANE, "a head is one simdgroup of 4 channels per lane");

const int rows = int(proj_shape[0]);
const int lane = int(thread_index_in_simdgroup);
const int unit = int(threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup);
const int first_row = int(threadgroup_position_in_grid.y) * ROWS;
const int end_row = metal::min(first_row + ROWS, rows);

if (unit < HEADS) {
  const int channel = unit * DK + lane * PER_LANE;
  float weight[CONV][PER_LANE];
#pragma unroll
  for (int tap = 0; tap < CONV; ++tap) {
    load_four<true>(conv_weight + tap * CHANNELS + channel, weight[tap]);
  }
  // The CONV - 1 rows before the tile, from the projection or, before its start, from the old window.
  float window[CONV][PER_LANE];
#pragma unroll
  for (int tap = 0; tap < CONV - 1; ++tap) {
    const int row = first_row + tap - (CONV - 1);
    load_four<ALIGNED>(input_row<CONV, CHANNELS, WIDTH>(proj, conv_state, row) + channel, window[tap]);
  }
  for (int row = first_row; row < end_row; ++row) {
    load_four<ALIGNED>(proj + size_t(row) * WIDTH + channel, window[CONV - 1]);
    float value[PER_LANE];
    convolve<CONV, PER_LANE>(weight, window, value);
    if (unit < HK) {
      scale_and_round<PER_LANE>(value, inverse_length<PER_LANE>(value) * Q_SCALE);
      store_four(q + (size_t(row) * HK + unit) * DK + lane * PER_LANE, value);
    } else if (unit < 2 * HK) {
      scale_and_round<PER_LANE>(value, inverse_length<PER_LANE>(value));
      store_four(k + (size_t(row) * HK + unit - HK) * DK + lane * PER_LANE, value);
    } else {
      store_four(v + (size_t(row) * HV + unit - 2 * HK) * DV + lane * PER_LANE, value);
    }
#pragma unroll
    for (int tap = 0; tap < CONV - 1; ++tap) {
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        window[tap][i] = window[tap + 1][i];
      }
    }
  }
  if (end_row == rows) {
#pragma unroll
    for (int tap = 0; tap < CONV - 1; ++tap) {
      store_four(next_conv_state + tap * CHANNELS + channel, window[tap]);
    }
  }
} else {
  const int head = (unit - HEADS) * 32 + lane;
  if (head < HV) {
    for (int row = first_row; row < end_row; ++row) {
      const size_t start = size_t(row) * WIDTH;
      decay[row * HV + head] = decay_gate(float(proj[start + A_OFFSET + head]), a_log[head], dt_bias[head]);
      beta[row * HV + head] = sigmoid(float(proj[start + B_OFFSET + head]));
    }
  }
}
