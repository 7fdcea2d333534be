// Prefill: the delta rule over M tokens, token by token, the state in registers from first to last.
//   S <- decay S;  S <- S + k (beta (v - S k));  y = S q          (float32, y bfloat16)
// Grid: (parts of a head's columns, HV heads), SIMDGROUPS simdgroups each. LANES lanes share COLUMNS columns of a
// head's state and split its keys in pieces of 8, so that one load of q and k serves 32 / LANES * COLUMNS columns
// and a sum takes log2(LANES) shuffles. No threadgroup memory, no barrier.
// The loads of a block of AHEAD tokens are issued while the block before it is computed.
// Bytes: 8 HV DV DK of state, 4 HV DV + 8 HV per token, and q and k of the head (from cache) for each simdgroup.
constexpr int GROUPS = 32 / LANES;
constexpr int PIECES = DK / (8 * LANES);
constexpr int KEYS = 8 * PIECES;
constexpr int PART = SIMDGROUPS * GROUPS * COLUMNS;

const int rows = int(q_shape[0]);
const int lane = int(thread_index_in_simdgroup);
const int lane_in_group = lane % LANES;
const int head = int(threadgroup_position_in_grid.y);
const int key_head = head / (HV / HK);
const int first_column = int(threadgroup_position_in_grid.x) * PART
    + (int(simdgroup_index_in_threadgroup) * GROUPS + lane / LANES) * COLUMNS;
const size_t first_state = size_t(head * DV + first_column) * DK;

float columns[COLUMNS][KEYS];
load_columns<8, LANES, DK>(state + first_state, lane_in_group, columns);

uint4 next_q[AHEAD][PIECES];
uint4 next_k[AHEAD][PIECES];
float next_v[AHEAD][COLUMNS];
float next_decay[AHEAD];
float next_beta[AHEAD];
#pragma unroll
for (int t = 0; t < AHEAD; ++t) {
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    next_q[t][p] = uint4(0, 0, 0, 0);
    next_k[t][p] = uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    next_v[t][c] = 0.0f;
  }
  next_decay[t] = 0.0f;
  next_beta[t] = 0.0f;
}

// The first pass (block -AHEAD) only loads.
for (int block = -AHEAD; block < rows; block += AHEAD) {
  uint4 packed_q[AHEAD][PIECES];
  uint4 packed_k[AHEAD][PIECES];
  float token_v[AHEAD][COLUMNS];
  float token_decay[AHEAD];
  float token_beta[AHEAD];
#pragma unroll
  for (int t = 0; t < AHEAD; ++t) {
    const size_t row = size_t(metal::min(block + AHEAD + t, rows - 1));
    const device bfloat* row_q = q + (row * HK + key_head) * DK + lane_in_group * 8;
    const device bfloat* row_k = k + (row * HK + key_head) * DK + lane_in_group * 8;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      packed_q[t][p] = next_q[t][p];
      packed_k[t][p] = next_k[t][p];
      next_q[t][p] = *(const device uint4*)(row_q + p * LANES * 8);
      next_k[t][p] = *(const device uint4*)(row_k + p * LANES * 8);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      token_v[t][c] = next_v[t][c];
      next_v[t][c] = float(v[(row * HV + head) * DV + first_column + c]);
    }
    token_decay[t] = next_decay[t];
    token_beta[t] = next_beta[t];
    next_decay[t] = decay[row * HV + head];
    next_beta[t] = beta[row * HV + head];
  }
#pragma unroll
  for (int t = 0; t < AHEAD; ++t) {
    const int row = block + t;
    if (row >= 0 && row < rows) {
      float q_keys[KEYS];
      float k_keys[KEYS];
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        unpack_eight_bfloats(packed_q[t][p], &q_keys[8 * p]);
        unpack_eight_bfloats(packed_k[t][p], &k_keys[8 * p]);
      }
      float out[COLUMNS];
      delta_rule<LANES, KEYS, COLUMNS>(columns, q_keys, k_keys, token_v[t], token_decay[t], token_beta[t], out);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        if (lane_in_group == c % LANES) {
          y[(size_t(row) * HV + head) * DV + first_column + c] = bfloat(out[c]);
        }
      }
    }
  }
}

store_columns<8, LANES, DK>(next_state + first_state, lane_in_group, columns);
