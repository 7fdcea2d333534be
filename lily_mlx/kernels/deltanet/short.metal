// Few rows of one sequence, or one row of each of several: from the projection to the gated norm in one launch.
//   x[m, c] = silu(sum over taps t of conv_weight[t, c] * window[m + t, c]), window = [conv_state; proj]
//   q = x_q / sqrt(DK |x_q|^2), k = x_k / |x_k|, v = x_v          (bfloat16, |x| with L2_EPS)
//   beta = sigmoid(b), decay = exp(-exp(a_log) softplus(a + dt_bias))
//   S <- decay S;  S <- S + k (beta (v - S k));  y = S q          (float32, y bfloat16)
//   out = bfloat(y * rsqrt(mean over DV of y^2 + EPS) * norm_weight * silu(z))
//   next_conv_state = the last CONV - 1 rows of the window
// The same roundings as prepare, scan and gated_norm; the same sums too if PIECE is 8 (scan) or 4 (step).
// Grid: (HV heads, sequences), SIMDGROUPS simdgroups each, which hold all columns of a head's state: LANES lanes share
// COLUMNS columns and split their keys in pieces of PIECE. As many rows of proj for each sequence, one sequence after
// another; slice b of the window and the state is sequence b's.
// Rows go in blocks of BLOCK. Simdgroups share the block's vectors q, k and v (one each, 4 channels per lane); after a
// barrier all of them take its tokens one by one; after another one they share the rows of y, for the norm.
// The new window of q and k is written by the key head's first value head, of v by its only reader.
// Bytes: 8 HV DV DK of state and 4 (CONV - 1) C of window per sequence, 2 (C + 2 HV DV + 2 HV) per row, 2 CONV C of
// weight. From cache: CONV times the rows, and q and k for each value head of their key head.
constexpr int GROUPS = 32 / LANES;
constexpr int KEYS = DK / LANES;
constexpr int PER_LANE = 4;
constexpr int VECTOR = DK / 8; // words of 16 bytes
constexpr int CHANNELS = 2 * HK * DK + HV * DV;
constexpr int WIDTH = CHANNELS + HV * DV + 2 * HV;
constexpr int B_OFFSET = CHANNELS + HV * DV;
constexpr int A_OFFSET = B_OFFSET + HV;
constexpr int HEADS_PER_KEY = HV / HK;
constexpr bool ALIGNED = WIDTH % 4 == 0;
constexpr int NORMS = (BLOCK + SIMDGROUPS - 1) / SIMDGROUPS; // rows of a simdgroup in a block
static_assert(DK == 32 * PER_LANE && DV == 32 * PER_LANE, "a vector is one simdgroup of 4 channels per lane");
static_assert(SIMDGROUPS * GROUPS * COLUMNS == DV, "a threadgroup holds all columns of a head");
static_assert(BLOCK <= 32, "one lane for the gates of each row");

threadgroup uint4 vectors[3 * BLOCK * VECTOR]; // q, k and v of the first row, then of the next
threadgroup uint4 y[BLOCK * VECTOR];
threadgroup float decay[BLOCK];
threadgroup float beta[BLOCK];
threadgroup float gain[DV];

const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int head = int(threadgroup_position_in_grid.x);
const int sequence = int(threadgroup_position_in_grid.y);
const int rows = int(proj_shape[0]) / int(threadgroups_per_grid.y);
const int key_head = head / HEADS_PER_KEY;
const int lane_in_group = lane % LANES;
const int first_column = (simdgroup * GROUPS + lane / LANES) * COLUMNS;
const int first_channel = lane * PER_LANE;
const size_t first_state = (size_t(sequence) * (HV * DV) + head * DV + first_column) * DK;
const device bfloat* projected = proj + size_t(sequence) * rows * WIDTH;
const device bfloat* window = conv_state + size_t(sequence) * ((CONV - 1) * CHANNELS);
device bfloat* next_window = next_conv_state + size_t(sequence) * ((CONV - 1) * CHANNELS);

// The state is the bulk of the bytes: ask for it before anything else.
float columns[COLUMNS][KEYS];
load_columns<PIECE, LANES, DK>(state + first_state, lane_in_group, columns);

if (simdgroup == SIMDGROUPS / 2) {
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    gain[first_channel + i] = float(norm_weight[first_channel + i]);
  }
}

for (int first_row = 0; first_row < rows; first_row += BLOCK) {
  const int count = metal::min(BLOCK, rows - first_row);

  uint2 z[NORMS]; // asked for long before its use
#pragma unroll
  for (int i = 0; i < NORMS; ++i) {
    const int row = simdgroup + i * SIMDGROUPS;
    if (row < count) {
      z[i] = load_four_packed<ALIGNED>(
          projected + size_t(first_row + row) * WIDTH + CHANNELS + head * DV + first_channel);
    }
  }

  for (int vector = simdgroup; vector < 3 * count; vector += SIMDGROUPS) {
    const int row = first_row + vector / 3;
    const int part = vector % 3;
    const int channel = first_channel + (part == 2 ? 2 * HK * DK + head * DV : part * HK * DK + key_head * DK);
    float weight[CONV][PER_LANE];
    float taps[CONV][PER_LANE];
#pragma unroll
    for (int tap = 0; tap < CONV; ++tap) {
      load_four<true>(conv_weight + tap * CHANNELS + channel, weight[tap]);
      load_four<ALIGNED>(
          input_row<CONV, CHANNELS, WIDTH>(projected, window, row + tap - (CONV - 1)) + channel, taps[tap]);
    }
    float value[PER_LANE];
    convolve<CONV, PER_LANE>(weight, taps, value);
    if (part < 2) {
      const float factor = inverse_length<PER_LANE>(value);
      scale_and_round<PER_LANE>(value, part == 0 ? factor * Q_SCALE : factor);
    }
    ((threadgroup uint2*)(vectors + vector * VECTOR))[lane] = pack_four_bfloats(value);
    if (row + 1 == rows && (part == 2 || head % HEADS_PER_KEY == 0)) {
#pragma unroll
      for (int tap = 1; tap < CONV; ++tap) {
        store_four(next_window + (tap - 1) * CHANNELS + channel, taps[tap]);
      }
    }
  }
  if (simdgroup == SIMDGROUPS - 1 && lane < count) {
    const device bfloat* row = projected + size_t(first_row + lane) * WIDTH;
    decay[lane] = decay_gate(float(row[A_OFFSET + head]), a_log[head], dt_bias[head]);
    beta[lane] = sigmoid(float(row[B_OFFSET + head]));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int token = 0; token < count; ++token) {
    const threadgroup uint4* token_vectors = vectors + token * (3 * VECTOR);
    float q[KEYS];
    float k[KEYS];
    load_keys<PIECE, LANES>(token_vectors, lane_in_group, q);
    load_keys<PIECE, LANES>(token_vectors + VECTOR, lane_in_group, k);
    float v[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      v[c] = float(((const threadgroup bfloat*)(token_vectors + 2 * VECTOR))[first_column + c]);
    }
    float out_columns[COLUMNS];
    delta_rule<LANES, KEYS, COLUMNS>(columns, q, k, v, decay[token], beta[token], out_columns);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      if (lane_in_group == c % LANES) {
        ((threadgroup bfloat*)(y + token * VECTOR))[first_column + c] = bfloat(out_columns[c]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma unroll
  for (int i = 0; i < NORMS; ++i) {
    const int row = simdgroup + i * SIMDGROUPS;
    if (row < count) {
      float value[PER_LANE];
      float weight[PER_LANE];
      float gate[PER_LANE];
      unpack_four_bfloats(((const threadgroup uint2*)(y + row * VECTOR))[lane], value);
      unpack_four_bfloats(z[i], gate);
#pragma unroll
      for (int j = 0; j < PER_LANE; ++j) {
        weight[j] = gain[first_channel + j];
      }
      norm_and_gate<PER_LANE>(value, weight, gate, EPS);
      store_four(
          out + (size_t(sequence) * rows + first_row + row) * (HV * DV) + head * DV + first_channel, value);
    }
  }
}

store_columns<PIECE, LANES, DK>(next_state + first_state, lane_in_group, columns);
