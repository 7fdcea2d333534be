// Decode, one token: the expert choice and the first half of the experts.
//   xn = bfloat(x * rsqrt(mean(x^2) + EPS) * norm_weight)
//   slot s < TOP_K: e = id of the s-th largest of logits[0..E), ties to the higher id; slot TOP_K: the shared expert
//   hidden[s, i] = bfloat(swiglu(dot(gate[e, i], xn), dot(up[e, i], xn)))
//   routing: the expert e of each slot, then the bits of the slots' scores (score_index): softmax of the logit (over the
//   chosen where NORMALISE, else over all E), and sigmoid(logits[E]) for slot TOP_K
// Grid: (blocks of SIMDGROUPS * ROWS * 32 / LANES rows of I, TOP_K + 1 slots). LANES lanes share ROWS gate rows and the
// same ROWS up rows. Every threadgroup repeats the norm and the choice (it needs nothing from the others); block 0 of a
// slot writes the slot's expert and score.
// Bytes: the two weight matrices of TOP_K + 1 experts once; 4 H + 4 E per threadgroup from cache.
constexpr int THREADS = 32 * SIMDGROUPS;
constexpr int PIECES = (H / 8 + THREADS - 1) / THREADS;
constexpr int SETS = 32 / LANES;
constexpr size_t ROUTED_ROWS = size_t(E) * I;
threadgroup uint4 staged[H / 8];
threadgroup float scratch[SIMDGROUPS];
threadgroup uint chosen[1];
const uint lane = thread_index_in_simdgroup;
const uint simd_group = simdgroup_index_in_threadgroup;
const int thread_id = int(thread_index_in_threadgroup);
const uint block = threadgroup_position_in_grid.x;
const uint slot = threadgroup_position_in_grid.y;

// Expert of this slot. Block 0 also needs the score, and so all the ranks.
if (slot < uint(TOP_K) && simd_group == 0u) {
  uint keys[PER_LANE];
  for (int i = 0; i < PER_LANE; ++i) {
    const uint id = lane + 32u * uint(i);
    keys[i] = 0u;
    if (id < uint(E)) {
      keys[i] = logit_key(logits[id]);
    }
  }
  uint expert;
  float score;
  select_experts<PER_LANE, TOP_K, NORMALISE>(keys, lane, block == 0u ? TOP_K : int(slot) + 1, expert, score);
  if (lane == slot) {
    chosen[0] = expert;
    if (block == 0u) {
      routing[slot] = expert;
      routing[score_index<TOP_K>(slot)] = as_type<uint>(score);
    }
  }
}
if (slot == uint(TOP_K) && block == 0u && thread_id == 0) {
  routing[score_index<TOP_K>(slot)] = as_type<uint>(sigmoid(logits[E]));
}

// RMSNorm into threadgroup memory, 8 values at a time.
float values[PIECES][8];
float squares = 0.0f;
for (int p = 0; p < PIECES; ++p) {
  const int piece = thread_id + THREADS * p;
  if (piece < H / 8) {
    unpack_eight(((const device uint4*)x)[piece], values[p]);
    for (int i = 0; i < 8; ++i) {
      squares = metal::fma(values[p][i], values[p][i], squares);
    }
  }
}
squares = threadgroup_sum<SIMDGROUPS>(squares, scratch, simd_group, lane);
const float inverse = metal::precise::rsqrt(squares / float(H) + EPS);
for (int p = 0; p < PIECES; ++p) {
  const int piece = thread_id + THREADS * p;
  if (piece < H / 8) {
    float gains[8];
    unpack_eight(((const device uint4*)norm_weight)[piece], gains);
    for (int i = 0; i < 8; ++i) {
      values[p][i] = values[p][i] * inverse * gains[i];
    }
    store_staged(staged, piece / 4, piece % 4, values[p]);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const int first_row = ((int(block) * SIMDGROUPS + int(simd_group)) * SETS + int(lane) / LANES) * ROWS;
const int row_lane = int(lane) % LANES;
int rows[ROWS];
for (int i = 0; i < ROWS; ++i) {
  rows[i] = metal::min(first_row + i, I - 1);
}
float result[ROWS];
if (slot < uint(TOP_K)) {
  const uint expert = chosen[0];
  const size_t word = expert_words<I, H, BITS>(expert);
  const size_t group = expert_groups<I, H, GROUP>(expert);
  gate_up_rows<BITS, GROUP, H, ROWS, LANES>(
      result, staged, gate + word, scales_of<BITS, GROUP, H>(gate, ROUTED_ROWS) + group,
      biases_of<BITS, GROUP, H>(gate, ROUTED_ROWS) + group, up + word,
      scales_of<BITS, GROUP, H>(up, ROUTED_ROWS) + group, biases_of<BITS, GROUP, H>(up, ROUTED_ROWS) + group, rows,
      row_lane);
} else {
  gate_up_rows<SHARED_BITS, SHARED_GROUP, H, ROWS, LANES>(
      result, staged, shared_gate, scales_of<SHARED_BITS, SHARED_GROUP, H>(shared_gate, I),
      biases_of<SHARED_BITS, SHARED_GROUP, H>(shared_gate, I), shared_up,
      scales_of<SHARED_BITS, SHARED_GROUP, H>(shared_up, I), biases_of<SHARED_BITS, SHARED_GROUP, H>(shared_up, I),
      rows, row_lane);
}
if (row_lane == 0) {
  for (int i = 0; i < ROWS; ++i) {
    if (first_row + i < I) {
      hidden[int(slot) * I + first_row + i] = bfloat(result[i]);
    }
  }
}
