// Decode: convolution, normalisation, gates and delta rule of one token.
//   x[c] = silu(sum over taps t of conv_weight[t, c] * window[t, c]), window = [conv_state; proj]
//   q = x_q / sqrt(DK |x_q|^2), k = x_k / |x_k|, v = x_v          (bfloat16, |x| with L2_EPS)
//   beta = sigmoid(b), decay = exp(-exp(a_log) softplus(a + dt_bias))
//   S <- decay S;  S <- S + k (beta (v - S k));  y = S q          (float32, y bfloat16)
// Grid: (parts of a head's columns, HV heads), SIMDGROUPS simdgroups each. LANES lanes share COLUMNS columns;
// a column is a row state[head, column, 0..DK) of memory. A threadgroup convolves its head's q and k and its own v.
// The new window of q and k is written by part 0 of the key head's first value head, of v by its only reader.
// Bytes: 8 HV DV DK of state, 2 (2 CONV + 3) C of convolution, q and k again (from cache) for each part.
constexpr int GROUPS = 32 / LANES;
constexpr int PIECES = DK / (4 * LANES);
constexpr int KEYS = 4 * PIECES;
constexpr int PART = SIMDGROUPS * GROUPS * COLUMNS;
constexpr int PER_LANE = DK / 32;
constexpr int CHANNELS = 2 * HK * DK + HV * DV;
constexpr int HEADS_PER_KEY = HV / HK;

threadgroup float activated[2 * DK + PART];
threadgroup float gates[2];

const int thread_index = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int part = int(threadgroup_position_in_grid.x);
const int head = int(threadgroup_position_in_grid.y);
const int key_head = head / HEADS_PER_KEY;
const int lane_in_group = lane % LANES;
const int first_in_part = (int(simdgroup_index_in_threadgroup) * GROUPS + lane / LANES) * COLUMNS;
const int first_column = part * PART + first_in_part;
const size_t first_state = size_t(head * DV + first_column) * DK;

// The state is the bulk of the bytes: ask for it before anything else.
float columns[COLUMNS][KEYS];
load_columns<4, LANES, DK>(state + first_state, lane_in_group, columns);

// Convolution: DK channels of q, DK of k, and this part's channels of v.
for (int item = thread_index; item < 2 * DK + PART; item += 32 * SIMDGROUPS) {
  int channel = 2 * HK * DK + head * DV + part * PART + item - 2 * DK;
  bool owner = true;
  if (item < 2 * DK) {
    channel = (item < DK ? 0 : HK * DK - DK) + key_head * DK + item;
    owner = part == 0 && head % HEADS_PER_KEY == 0;
  }
  const bfloat newest = proj[channel];
  float sum = 0.0f;
#pragma unroll
  for (int tap = 0; tap < CONV - 1; ++tap) {
    const bfloat value = conv_state[tap * CHANNELS + channel];
    sum = metal::fma(float(conv_weight[tap * CHANNELS + channel]), float(value), sum);
    if (owner && tap > 0) {
      next_conv_state[(tap - 1) * CHANNELS + channel] = value;
    }
  }
  sum = metal::fma(float(conv_weight[(CONV - 1) * CHANNELS + channel]), float(newest), sum);
  if (owner) {
    next_conv_state[(CONV - 2) * CHANNELS + channel] = newest;
  }
  const float value = silu(sum);
  activated[item] = item < 2 * DK ? value : round_to_bfloat(value);
}
if (thread_index == 32 * SIMDGROUPS - 1) {
  gates[0] = decay_gate(float(proj[CHANNELS + HV * DV + HV + head]), a_log[head], dt_bias[head]);
  gates[1] = sigmoid(float(proj[CHANNELS + HV * DV + head]));
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Lengths, summed as in prepare.metal: lane i holds the PER_LANE keys from i * PER_LANE on.
float spread[PER_LANE];
#pragma unroll
for (int i = 0; i < PER_LANE; ++i) {
  spread[i] = activated[lane * PER_LANE + i];
}
const float q_factor = inverse_length<PER_LANE>(spread) * Q_SCALE;
#pragma unroll
for (int i = 0; i < PER_LANE; ++i) {
  spread[i] = activated[DK + lane * PER_LANE + i];
}
const float k_factor = inverse_length<PER_LANE>(spread);

float q[KEYS];
float k[KEYS];
#pragma unroll
for (int p = 0; p < PIECES; ++p) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = (p * LANES + lane_in_group) * 4 + i;
    q[4 * p + i] = activated[key];
    k[4 * p + i] = activated[DK + key];
  }
}
scale_and_round<KEYS>(q, q_factor);
scale_and_round<KEYS>(k, k_factor);
float v[COLUMNS];
#pragma unroll
for (int c = 0; c < COLUMNS; ++c) {
  v[c] = activated[2 * DK + first_in_part + c];
}

float out[COLUMNS];
delta_rule<LANES, KEYS, COLUMNS>(columns, q, k, v, gates[0], gates[1], out);

store_columns<4, LANES, DK>(next_state + first_state, lane_in_group, columns);
#pragma unroll
for (int c = 0; c < COLUMNS; ++c) {
  if (lane_in_group == c % LANES) {
    y[head * DV + first_column + c] = bfloat(out[c]);
  }
}
