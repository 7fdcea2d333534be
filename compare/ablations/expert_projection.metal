// Decode: norm, expert choice and one projection (gate or up) of one token, without the activation.
//   xn = bfloat(x * rsqrt(mean(x^2) + EPS) * norm_weight)
//   slot s < TOP_K: e = id of the s-th largest of logits[0..E), ties to the higher id; slot TOP_K: the shared expert
//   rows[s, n] = dot(weight[e, n], xn);  routing: the experts, then the bits of the scores, a softmax (over the chosen where
//   NORMALISE), and sigmoid(logits[E]) for slot TOP_K
// Grid: (blocks of rows, TOP_K + 1 slots), SIMDGROUPS simdgroups. As in the engine every threadgroup repeats the norm
// and the choice; block 0 of a slot writes the slot's expert and score.
// Bytes: the matrix of TOP_K + 1 experts once; 4 K + 4 E per threadgroup from cache.
constexpr int THREADS = 32 * SIMDGROUPS;
threadgroup uint4 staged[K / 8];
threadgroup float values[E];
threadgroup float best[TOP_K];
threadgroup uint chosen[TOP_K];
threadgroup float scratch[SIMDGROUPS];
const uint lane = thread_index_in_simdgroup;
const uint simd_group = simdgroup_index_in_threadgroup;
const int thread_id = int(thread_index_in_threadgroup);
const uint block = threadgroup_position_in_grid.x;
const uint slot = threadgroup_position_in_grid.y;

// An expert's rank is the number of experts before it.
for (int e = thread_id; e < E; e += THREADS) {
  values[e] = metal::isnan(logits[e]) ? -INFINITY : logits[e];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int e = thread_id; e < E; e += THREADS) {
  const float own = values[e];
  int rank = 0;
  for (int other = 0; other < E; ++other) {
    rank += values[other] > own || (values[other] == own && other > e) ? 1 : 0;
  }
  if (rank < TOP_K) {
    best[rank] = own;
    chosen[rank] = uint(e);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (block == 0u && thread_id == 0) {
  if (slot == uint(TOP_K)) {
    routing[2 * TOP_K] = as_type<uint>(1.0f / (1.0f + metal::precise::exp(-logits[E])));
  } else {
    float total = 0.0f;
    for (int i = 0; i < (NORMALISE ? TOP_K : E); ++i) {
      total += metal::precise::exp((NORMALISE ? best[NORMALISE ? i : 0] : values[i]) - best[0]);
    }
    routing[slot] = chosen[slot];
    routing[uint(TOP_K) + slot] = as_type<uint>(metal::precise::exp(best[slot] - best[0]) / total);
  }
}

float squares = 0.0f;
for (int piece = thread_id; piece < K / 8; piece += THREADS) {
  float x_values[8];
  unpack_eight(((const device uint4*)x)[piece], x_values);
  for (int i = 0; i < 8; ++i) {
    squares = metal::fma(x_values[i], x_values[i], squares);
  }
}
squares = threadgroup_sum<SIMDGROUPS>(squares, scratch, simd_group, lane);
const float inverse = metal::precise::rsqrt(squares / float(K) + EPS);
for (int piece = thread_id; piece < K / 8; piece += THREADS) {
  float x_values[8];
  float gains[8];
  unpack_eight(((const device uint4*)x)[piece], x_values);
  unpack_eight(((const device uint4*)norm_weight)[piece], gains);
  for (int i = 0; i < 8; ++i) {
    x_values[i] = x_values[i] * inverse * gains[i];
  }
  store_staged(staged, piece / 4, piece % 4, x_values);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const int first = set_row<ROWS, LANES>(int(block) * SIMDGROUPS + int(simd_group), lane);
const threadgroup uint4* input = staged;
const int row_lane = int(lane) % LANES;
int own_rows[ROWS];
float sums[ROWS];
begin_rows<N, ROWS>(own_rows, sums, first);
if (slot < uint(TOP_K)) {
  const size_t row = size_t(chosen[slot]) * N;
  add_rows<BITS, GROUP, K, ROWS, LANES>(
      sums, input, weight + row * (K / UNIT * BITS),
      scales_of<BITS, GROUP, K>(weight, size_t(E) * N) + row * (K / GROUP),
      biases_of<BITS, GROUP, K>(weight, size_t(E) * N) + row * (K / GROUP), own_rows, row_lane);
} else {
  add_rows<SHARED_BITS, SHARED_GROUP, K, ROWS, LANES>(
      sums, input, shared_weight, scales_of<SHARED_BITS, SHARED_GROUP, K>(shared_weight, N),
      biases_of<SHARED_BITS, SHARED_GROUP, K>(shared_weight, N), own_rows, row_lane);
}
write_rows<N, ROWS, LANES>(rows + size_t(slot) * N, sums, first, lane);
