// Decode, one token: the second half of the experts, weighted and added up.
//   out[h] = bfloat(residual[h] + sum over slots s of score[s] * dot(down[expert[s], h], hidden[s]))
// where slot TOP_K is the shared expert; experts and scores are in `routing`, see score_index. float32 until the one rounding; slots are added in order.
// Grid: one threadgroup per ROWS * 32 / LANES values of h. One simdgroup per slot (16 at most, then they take turns):
// all slots' weights are read at the same time.
// Bytes: the down matrices of TOP_K + 1 experts once; 2 (TOP_K + 1) I per threadgroup from cache.
constexpr int SETS = 32 / LANES;
constexpr int BLOCK = SETS * ROWS;
constexpr size_t ROUTED_ROWS = size_t(E) * H;
threadgroup float parts[(TOP_K + 1) * BLOCK];
const int lane = int(thread_index_in_simdgroup);
const int first_row = int(threadgroup_position_in_grid.x) * BLOCK;
const int set_row = lane / LANES * ROWS;
const int row_lane = lane % LANES;
int rows[ROWS];
for (int i = 0; i < ROWS; ++i) {
  rows[i] = metal::min(first_row + set_row + i, H - 1);
}
for (int slot = int(simdgroup_index_in_threadgroup); slot <= TOP_K; slot += SIMDGROUPS) {
  float sums[ROWS];
  for (int i = 0; i < ROWS; ++i) {
    sums[i] = 0.0f;
  }
  if (slot < TOP_K) {
    const uint expert = metal::min(uint(routing[slot]), uint(E - 1));
    const size_t word = expert_words<H, I, BITS>(expert);
    const size_t group = expert_groups<H, I, GROUP>(expert);
    const device bfloat* scales = scales_of<BITS, GROUP, I>(down, ROUTED_ROWS) + group;
    const device bfloat* biases = biases_of<BITS, GROUP, I>(down, ROUTED_ROWS) + group;
    RowUnits<BITS, ROWS> ahead[1];
    start_rows<BITS, GROUP, I, ROWS, LANES, 1>(ahead, down + word, scales, biases, rows, row_lane);
    accumulate_rows<BITS, GROUP, I, ROWS, LANES, 1>(
        sums, ahead, hidden + slot * I, down + word, scales, biases, rows, row_lane);
  } else {
    const device bfloat* scales = scales_of<SHARED_BITS, SHARED_GROUP, I>(shared_down, H);
    const device bfloat* biases = biases_of<SHARED_BITS, SHARED_GROUP, I>(shared_down, H);
    RowUnits<SHARED_BITS, ROWS> ahead[1];
    start_rows<SHARED_BITS, SHARED_GROUP, I, ROWS, LANES, 1>(ahead, shared_down, scales, biases, rows, row_lane);
    accumulate_rows<SHARED_BITS, SHARED_GROUP, I, ROWS, LANES, 1>(
        sums, ahead, hidden + slot * I, shared_down, scales, biases, rows, row_lane);
  }
  const float score = as_type<float>(uint(routing[score_index<TOP_K>(uint(slot))]));
  for (int i = 0; i < ROWS; ++i) {
    const float sum = lanes_sum<LANES>(sums[i]);
    if (row_lane == 0) {
      parts[slot * BLOCK + set_row + i] = score * sum;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const int row = int(thread_index_in_threadgroup);
if (row < BLOCK && first_row + row < H) {
  float total = 0.0f;
  for (int slot = 0; slot <= TOP_K; ++slot) {
    total += parts[slot * BLOCK + row];
  }
  out[first_row + row] = bfloat(float(residual[first_row + row]) + total);
}
