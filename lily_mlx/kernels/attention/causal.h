// Causal attention of a block of query rows, with the sums of each simdgroup's rows in its registers.
// Needs fragment.h and tile.h before it.
//
// The query heads of a KV head are packed with positions: row r of a chunk is head r % G of token r / G, so that a
// key is read once for all of them.
#ifndef LILY_ATTENTION_CAUSAL
#define LILY_ATTENTION_CAUSAL

struct KeyValueRows {
  int tail_begin; // tokens in keys and values; the others are in the tail
  int capacity;   // rows of keys and values
  int head;       // KV head
};

// tile[r] = row `first` + r. Rows from `end` on become 0: the cache is undefined there. A tile never holds rows of both
// levels, because TAIL is a multiple of KEYS and so is the first row.
template <int D, int TAIL, int KEYS, int STRIDE, int THREADS>
inline void load_rows(
    threadgroup bfloat* tile,
    const device bfloat* main,
    const device bfloat* tail,
    KeyValueRows cache,
    int first,
    int end,
    int thread_index) {
  const device bfloat* rows = first < cache.tail_begin
      ? main + (size_t(cache.head) * cache.capacity + first) * D
      : tail + (size_t(cache.head) * TAIL + (first - cache.tail_begin)) * D;
  for (int i = thread_index; i < KEYS * (D / 8); i += THREADS) {
    const int row = i / (D / 8);
    const int piece = i % (D / 8);
    uint4 values = uint4(0u, 0u, 0u, 0u);
    if (first + row < end) {
      values = ((const device uint4*)(rows + row * D))[piece];
    }
    *(threadgroup uint4*)(tile + row * STRIDE + 8 * piece) = values;
  }
}

// Reduces over the lanes that hold the same row of a tile. The lanes of a row differ in a fixed set of lane bits in
// every backend's layout, and those are found through row().
inline float row_max(float value) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    if (Tile<8, 8>::row(0, uint(bit)) == Tile<8, 8>::row(0, 0u)) {
      value = metal::max(value, simd_shuffle_xor(value, ushort(bit)));
    }
  }
  return value;
}

inline float row_sum(float value) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    if (Tile<8, 8>::row(0, uint(bit)) == Tile<8, 8>::row(0, 0u)) {
      value += simd_shuffle_xor(value, ushort(bit));
    }
  }
  return value;
}

// What a simdgroup knows of its M rows. A lane's elements stand in M / 8 rows: element i in row group row(i, 0) / 8.
template <int M, int D, int COLUMNS>
struct RowSums {
  Tile<M, COLUMNS> sums[D / COLUMNS]; // sum of 2^(score - largest) * value
  float largest[M / 8];               // largest score so far, base 2; -INFINITY before the first visible key
  float weights[M / 8];               // sum of 2^(score - largest)

  // Row of the lane's elements in row group `group`.
  static int row(int group, uint lane) {
    return Tile<M, 8>::row(2 * group, lane);
  }

  static int group(int i) {
    return Tile<M, COLUMNS>::row(i, 0u) / 8;
  }
};

// Adds keys `begin` to `end` - 1 to the sums of the simdgroup's rows `first_row` to `first_row` + M - 1; rows from
// `row_count` on are padding. `queries` is the KV head's first query; `tile` is shared by the threadgroup, whose
// threads must all call with the same `begin` and `end`; `scratch` is the simdgroup's own.
template <int M, int D, int COLUMNS, int KEYS, int G, int HQ, int TAIL, int THREADS>
inline void attend(
    thread RowSums<M, D, COLUMNS>& state,
    const device bfloat* queries,
    const device bfloat* keys,
    const device bfloat* values,
    const device bfloat* tail_keys,
    const device bfloat* tail_values,
    KeyValueRows cache,
    int position,
    int first_row,
    int row_count,
    int begin,
    int end,
    float scale,
    threadgroup bfloat* tile,
    threadgroup bfloat* scratch,
    int thread_index,
    uint lane) {
  constexpr int TILE_STRIDE = D + 8; // 16 bytes more than a row, so that rows start in different banks
  constexpr int SCRATCH_STRIDE = COLUMNS + 8;
  int last_key[M / 8];
#pragma unroll
  for (int g = 0; g < M / 8; ++g) {
    state.largest[g] = -INFINITY;
    state.weights[g] = 0.0f;
    last_key[g] = position + metal::min(first_row + state.row(g, lane), row_count - 1) / G;
  }
#pragma unroll
  for (int c = 0; c < D / COLUMNS; ++c) {
    state.sums[c].clear();
  }
  for (int key = begin; key < end; key += KEYS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_rows<D, TAIL, KEYS, TILE_STRIDE, THREADS>(tile, keys, tail_keys, cache, key, end, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    Tile<M, KEYS> scores;
    scores.clear();
    for (int c = 0; c < D / COLUMNS; ++c) {
      for (int i = int(lane); i < M * (COLUMNS / 8); i += 32) {
        const int row = i / (COLUMNS / 8);
        const int column = c * COLUMNS + i % (COLUMNS / 8) * 8;
        uint4 piece = uint4(0u, 0u, 0u, 0u);
        if (first_row + row < row_count) {
          const int token = (first_row + row) / G;
          const int head = (first_row + row) % G;
          piece = *(const device uint4*)(queries + (size_t(token) * HQ + head) * D + column);
        }
        *(threadgroup uint4*)(scratch + row * SCRATCH_STRIDE + i % (COLUMNS / 8) * 8) = piece;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      tile_multiply_transposed<M, KEYS, COLUMNS>(
          scores, scratch, SCRATCH_STRIDE, tile + c * COLUMNS, TILE_STRIDE);
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }

    // Online softmax, base 2 with the scale folded in.
    float largest[M / 8];
#pragma unroll
    for (int g = 0; g < M / 8; ++g) {
      largest[g] = state.largest[g];
    }
#pragma unroll
    for (int i = 0; i < M * KEYS / 32; ++i) {
      const int g = scores.row(i, 0u) / 8;
      const float score = key + scores.column(i, lane) <= last_key[g] ? scores.get(i) * scale : -INFINITY;
      scores.set(i, score);
      largest[g] = metal::max(largest[g], score);
    }
    float shrink[M / 8];
    bool changed = false;
#pragma unroll
    for (int g = 0; g < M / 8; ++g) {
      largest[g] = row_max(largest[g]);
      // A row that has seen no key yet keeps sums of 0 whatever they are multiplied by.
      shrink[g] = state.largest[g] == largest[g] ? 1.0f : metal::exp2(state.largest[g] - largest[g]);
      changed = changed || shrink[g] != 1.0f;
      state.largest[g] = largest[g];
      state.weights[g] *= shrink[g];
    }
#pragma unroll
    for (int i = 0; i < M * KEYS / 32; ++i) {
      const int g = scores.row(i, 0u) / 8;
      const float score = scores.get(i);
      const bfloat weight = bfloat(score == -INFINITY ? 0.0f : metal::exp2(score - largest[g]));
      state.weights[g] += float(weight); // the rounded weights are what multiplies the values
      scratch[scores.row(i, lane) * SCRATCH_STRIDE + scores.column(i, lane)] = weight;
    }
    if (simd_any(changed)) {
#pragma unroll
      for (int c = 0; c < D / COLUMNS; ++c) {
#pragma unroll
        for (int i = 0; i < M * COLUMNS / 32; ++i) {
          state.sums[c].set(i, state.sums[c].get(i) * shrink[state.group(i)]);
        }
      }
    }

    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_rows<D, TAIL, KEYS, TILE_STRIDE, THREADS>(tile, values, tail_values, cache, key, end, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int c = 0; c < D / COLUMNS; ++c) {
      tile_multiply<M, COLUMNS, KEYS>(state.sums[c], scratch, SCRATCH_STRIDE, tile + c * COLUMNS, TILE_STRIDE);
    }
  }
#pragma unroll
  for (int g = 0; g < M / 8; ++g) {
    state.weights[g] = row_sum(state.weights[g]);
  }
}
#endif
