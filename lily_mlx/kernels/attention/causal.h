// Causal attention of a block of query rows, with the sums of each simdgroup's rows in its registers.
// Needs fragment.h, tile.h and copy.h before it.
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

// Begins to copy rows `first` + r to tile[r]. Rows from `end` on become 0: the cache is undefined there. A tile never
// holds rows of both levels, because TAIL is a multiple of KEYS and so is the first row.
template <int D, int TAIL, int KEYS, int STRIDE, int THREADS>
inline void begin_rows(
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
    begin_copy(
        (threadgroup uint4*)(tile + row * STRIDE + 8 * piece), (const device uint4*)(rows + row * D) + piece,
        first + row < end);
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

// The queries of each simdgroup, SIMDGROUPS * M rows from `block_row` on, into its registers through `tile`, which
// holds KEYS rows. Rows from `row_count` on become 0.
template <int M, int D, int KEYS, int G, int HQ, int STRIDE, int SIMDGROUPS>
inline void load_queries(
    thread TileOperand<M, D>& own,
    const device bfloat* queries,
    int block_row,
    int row_count,
    threadgroup bfloat* tile,
    int thread_index,
    int simdgroup) {
  for (int start = 0; start < SIMDGROUPS * M; start += KEYS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index; i < KEYS * (D / 8); i += 32 * SIMDGROUPS) {
      const int row = i / (D / 8);
      const int packed = block_row + start + row;
      uint4 piece = uint4(0u, 0u, 0u, 0u);
      if (packed < row_count) {
        piece = ((const device uint4*)(queries + (size_t(packed / G) * HQ + packed % G) * D))[i % (D / 8)];
      }
      *(threadgroup uint4*)(tile + row * STRIDE + i % (D / 8) * 8) = piece;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int own_row = simdgroup * M - start;
    if (own_row >= 0 && own_row < KEYS) {
      load_operand(own, tile + own_row * STRIDE, STRIDE);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Adds keys `begin` to `end` - 1, of which there is one, to the sums of the simdgroup's M rows among the rows from
// `block_row` on; rows from `row_count` on are padding. `queries` is the KV head's first query. The threadgroup shares
// `key_tile` and `value_tile`, KEYS rows each; all its threads call with the same arguments. The next keys are copied
// while the values are multiplied, and the next values while the keys are.
template <int M, int D, int COLUMNS, int KEYS, int G, int HQ, int TAIL, int SIMDGROUPS>
inline void attend(
    thread RowSums<M, D, COLUMNS>& state,
    const device bfloat* queries,
    const device bfloat* keys,
    const device bfloat* values,
    const device bfloat* tail_keys,
    const device bfloat* tail_values,
    KeyValueRows cache,
    int position,
    int block_row,
    int row_count,
    int begin,
    int end,
    float scale,
    threadgroup bfloat* key_tile,
    threadgroup bfloat* value_tile,
    int thread_index,
    int simdgroup,
    uint lane) {
  constexpr int STRIDE = D + 8; // 16 bytes more than a row, so that rows start in different banks
  constexpr int THREADS = 32 * SIMDGROUPS;
  const int first_row = block_row + simdgroup * M;
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
  TileOperand<M, D> own;
  load_queries<M, D, KEYS, G, HQ, STRIDE, SIMDGROUPS>(
      own, queries, block_row, row_count, key_tile, thread_index, simdgroup);

  begin_rows<D, TAIL, KEYS, STRIDE, THREADS>(key_tile, keys, tail_keys, cache, begin, end, thread_index);
  end_group();
  begin_rows<D, TAIL, KEYS, STRIDE, THREADS>(value_tile, values, tail_values, cache, begin, end, thread_index);
  end_group();
  for (int key = begin; key < end; key += KEYS) {
    const int next = key + KEYS;
    Tile<M, KEYS> scores;
    scores.clear();
    finish_groups<1>();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_multiply_transposed(scores, own, key_tile, STRIDE);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (next < end) {
      begin_rows<D, TAIL, KEYS, STRIDE, THREADS>(key_tile, keys, tail_keys, cache, next, end, thread_index);
    }
    end_group();

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
      const float weight = float(bfloat(score == -INFINITY ? 0.0f : metal::exp2(score - largest[g])));
      state.weights[g] += weight; // the rounded weights are what multiplies the values
      scores.set(i, weight);
    }
    TileOperand<M, KEYS> weights;
    round_operand(weights, scores);
    if (simd_any(changed)) {
#pragma unroll
      for (int c = 0; c < D / COLUMNS; ++c) {
#pragma unroll
        for (int i = 0; i < M * COLUMNS / 32; ++i) {
          state.sums[c].set(i, state.sums[c].get(i) * shrink[state.group(i)]);
        }
      }
    }

    finish_groups<1>();
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int c = 0; c < D / COLUMNS; ++c) {
      tile_multiply(state.sums[c], weights, value_tile + c * COLUMNS, STRIDE);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (next < end) {
      begin_rows<D, TAIL, KEYS, STRIDE, THREADS>(value_tile, values, tail_values, cache, next, end, thread_index);
    }
    end_group();
  }
#pragma unroll
  for (int g = 0; g < M / 8; ++g) {
    state.weights[g] = row_sum(state.weights[g]);
  }
}
#endif
