// Prefill: causal attention of a chunk over the cache that already holds it, times the sigmoid of its output gate.
//
//   out[m, h] = sigmoid(gate[m, h]) * sum_j softmax_j(q[m, h] . k[j] * D^-0.5) v[j],   j <= position + m
//
// Grid: (blocks of ROWS query rows, KV heads), 4 simdgroups in a threadgroup. The query heads of a KV head are packed
// with positions: row r of the chunk is head r % G of token r / G, so that a key is read once for all of them. The
// blocks with the most keys start first. For each KEYS keys the simdgroups split the ROWS x KEYS scores by rows and
// keys, then the ROWS x D sums by dimensions; the sums stay in registers. Keys and values pass through one tile of
// SLICE dimensions. Moves 4 * D bytes per key and block, and the block's queries and outputs once.
constexpr int SIMDGROUPS = 4;
constexpr int THREADS = 32 * SIMDGROUPS;
constexpr int SLICES = D / SLICE;
constexpr int Q_STRIDE = D + 8; // 16 bytes more than a row, so that rows start in different banks
constexpr int KV_STRIDE = SLICE + 8;
constexpr int S_STRIDE = KEYS + 4;
constexpr int SCORE_ROWS = ROWS / 2;
constexpr int SCORE_KEYS = KEYS / 2;
constexpr int DIMS = SLICE / SIMDGROUPS; // a simdgroup's share of a slice
constexpr int THREADS_PER_ROW = 4;
constexpr int ROW_KEYS = KEYS / THREADS_PER_ROW;
threadgroup bfloat q_tile[ROWS * Q_STRIDE];
threadgroup bfloat kv_tile[KEYS * KV_STRIDE];
threadgroup float scores[ROWS * S_STRIDE];
threadgroup float shrinks[ROWS];
threadgroup float weight_sums[ROWS];
threadgroup bfloat* weights = (threadgroup bfloat*)scores; // the scores are read before weights replace them
constexpr int W_STRIDE = 2 * S_STRIDE;

const uint lane = thread_index_in_simdgroup;
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int thread_id = int(thread_index_in_threadgroup);
const int tokens = q_shape[0];
const int block = int(threadgroups_per_grid.x - 1 - threadgroup_position_in_grid.x);
const int kv_head = int(threadgroup_position_in_grid.y);
const int first_row = block * ROWS;
const int rows = metal::min(ROWS, tokens * G - first_row);

KeyValueRows cache;
cache.length = position[0] + tokens;
cache.tail_begin = cache.length / TAIL * TAIL;
cache.capacity = keys_shape[1];
cache.head = kv_head;

for (int i = thread_id; i < ROWS * (D / 8); i += THREADS) {
  const int row = i / (D / 8);
  const int piece = i % (D / 8);
  uint4 values = uint4(0u);
  if (row < rows) {
    const int token = (first_row + row) / G;
    const int head = kv_head * G + (first_row + row) % G;
    values = *(const device uint4*)(q + (size_t(token) * HQ + head) * D + piece * 8);
  }
  *(threadgroup uint4*)(q_tile + row * Q_STRIDE + piece * 8) = values;
}

Tile<ROWS, DIMS> sums[SLICES];
#pragma unroll
for (int slice = 0; slice < SLICES; ++slice) {
  sums[slice].clear();
}

// Threads 4 r to 4 r + 3 follow row r, a quarter of its keys each.
const int own_row = thread_id / THREADS_PER_ROW;
const int own_key = thread_id % THREADS_PER_ROW * ROW_KEYS;
const bool has_row = own_row < ROWS;
const int last_key = position[0] + (first_row + metal::min(own_row, rows - 1)) / G;
float largest = -INFINITY;
float weight_sum = 0.0f;

const int end = position[0] + (first_row + rows - 1) / G + 1;
for (int key = 0; key < end; key += KEYS) {
  Tile<SCORE_ROWS, SCORE_KEYS> score;
  score.clear();
  const int score_row = simdgroup / 2 * SCORE_ROWS;
  const int score_key = simdgroup % 2 * SCORE_KEYS;
  for (int slice = 0; slice < SLICES; ++slice) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_rows<D, TAIL, KEYS, SLICE, KV_STRIDE, THREADS>(
        kv_tile, keys, tail_keys, cache, key, end, slice * SLICE, thread_id);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_multiply_transposed<SCORE_ROWS, SCORE_KEYS, SLICE>(
        score, q_tile + score_row * Q_STRIDE + slice * SLICE, Q_STRIDE, kv_tile + score_key * KV_STRIDE, KV_STRIDE);
  }
#pragma unroll
  for (int i = 0; i < score.ELEMENTS; ++i) {
    scores[(score_row + score.row(i, lane)) * S_STRIDE + score_key + score.column(i, lane)] = score.get(i);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Softmax of the rows, base 2 with the scale folded in. Key 0 is visible to every row, so `largest` is finite.
  float own[ROW_KEYS];
  float tile_largest = largest;
#pragma unroll
  for (int i = 0; i < ROW_KEYS; ++i) {
    own[i] = -INFINITY;
    if (has_row && key + own_key + i <= last_key) {
      own[i] = scores[own_row * S_STRIDE + own_key + i] * SCALE;
    }
    tile_largest = metal::max(tile_largest, own[i]);
  }
  tile_largest = metal::max(tile_largest, simd_shuffle_xor(tile_largest, ushort(1)));
  tile_largest = metal::max(tile_largest, simd_shuffle_xor(tile_largest, ushort(2)));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (has_row) {
    const float shrink = metal::exp2(largest - tile_largest);
    float tile_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ROW_KEYS; ++i) {
      const bfloat weight = bfloat(metal::exp2(own[i] - tile_largest));
      tile_sum += float(weight); // the rounded weights are what multiplies the values
      weights[own_row * W_STRIDE + own_key + i] = weight;
    }
    weight_sum = weight_sum * shrink + tile_sum;
    largest = tile_largest;
    if (own_key == 0) {
      shrinks[own_row] = shrink;
    }
  }
#pragma unroll
  for (int slice = 0; slice < SLICES; ++slice) {
    load_rows<D, TAIL, KEYS, SLICE, KV_STRIDE, THREADS>(
        kv_tile, values, tail_values, cache, key, end, slice * SLICE, thread_id);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int i = 0; i < sums[slice].ELEMENTS; ++i) {
      sums[slice].set(i, sums[slice].get(i) * shrinks[sums[slice].row(i, lane)]);
    }
    tile_multiply<ROWS, DIMS, KEYS>(sums[slice], weights, W_STRIDE, kv_tile + simdgroup * DIMS, KV_STRIDE);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

weight_sum += simd_shuffle_xor(weight_sum, ushort(1));
weight_sum += simd_shuffle_xor(weight_sum, ushort(2));
if (has_row && own_key == 0) {
  weight_sums[own_row] = weight_sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
for (int slice = 0; slice < SLICES; ++slice) {
#pragma unroll
  for (int i = 0; i < sums[slice].ELEMENTS; ++i) {
    const int row = sums[slice].row(i, lane);
    if (row < rows) {
      const int token = (first_row + row) / G;
      const int head = kv_head * G + (first_row + row) % G;
      const int dim = slice * SLICE + simdgroup * DIMS + sums[slice].column(i, lane);
      const float gate = float(proj[size_t(token) * P + (2 * head + 1) * D + dim]);
      const float value = sums[slice].get(i) / weight_sums[row];
      out[(size_t(token) * HQ + head) * D + dim] = bfloat(value / (1.0f + metal::exp(-gate)));
    }
  }
}
