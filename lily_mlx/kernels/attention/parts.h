// One part of decode attention: rows of keys and values against the new token's queries, all of a KV head.
// Needs head.h before it.
#ifndef LILY_ATTENTION_PARTS
#define LILY_ATTENTION_PARTS

// The part has rows `begin` to `end` - 1 of a block of keys and values, of which there is one; `key_rows` and
// `value_rows` point to the block's row 0. A part of the tail (`in_tail`) first writes its rows to the new tail, the new
// token's among them at `new_row`, and reads them there: key_rows and value_rows are the new tail then.
// `proj` is the token's row of the joined projection and `position` its position; `kv_head` is one of `kv_heads`.
// Query head h of the KV head writes entry first_entry + h * entry_stride of `partial` (D values) and `stats` (2).
// All threads of SETS * STREAMS simdgroups call. Every threadgroup prepares the queries for itself, with AHEAD while its
// first keys and values are on their way. `shared_words` holds the queries, G * D values of bfloat16, and later the sums
// of STAGED heads of all simdgroups in float. A simdgroup keeps q and the sums of HEADS heads in registers, D / 32
// dimensions per lane, and streams every STREAMS-th block of ROWS rows: one block yields 32 scores, one per lane.
template <int G, int D, int R, int HEADS, int PADDED, int SETS, int STREAMS, int STAGED>
inline void attend_part(
    const device bfloat* proj,
    const device bfloat* q_norm,
    const device bfloat* k_norm,
    const device uint* turns,
    const device bfloat* key_rows,
    const device bfloat* value_rows,
    const device bfloat* tail_keys,
    const device bfloat* tail_values,
    device bfloat* new_tail_keys,
    device bfloat* new_tail_values,
    device float* partial,
    device float* stats,
    size_t first_entry,
    size_t entry_stride,
    bool in_tail,
    int begin,
    int end,
    int new_row,
    int position,
    int kv_head,
    int kv_heads,
    float scale,
    float eps,
    threadgroup uint4* shared_words,
    threadgroup float* maxima,
    threadgroup float* sums,
    int thread_index,
    int simdgroup,
    uint lane) {
  constexpr int E = D / 32;
  constexpr int ROWS = 32 / PADDED;
  constexpr int SIMDGROUPS = SETS * STREAMS;
  // A core has registers for one threadgroup with so many sums, and then some to spare: for the next rows.
  constexpr bool AHEAD = HEADS * E > 32;
  threadgroup bfloat* queries = (threadgroup bfloat*)shared_words; // until each simdgroup has its own in registers
  threadgroup float* staged = (threadgroup float*)shared_words;    // after the last block
  const int head_set = simdgroup / STREAMS;
  const int stream = simdgroup % STREAMS;

  LaneRow<E> next_keys[ROWS];
  LaneRow<E> next_values[ROWS];
  if (in_tail) {
    for (int row = begin + simdgroup; row < end; row += SIMDGROUPS) {
      const int offset = row * D;
      if (row < new_row) {
        copy_row<D>(tail_keys + offset, new_tail_keys + offset, lane);
        copy_row<D>(tail_values + offset, new_tail_values + offset, lane);
      } else {
        copy_row<D>(proj + ((2 * G + 1) * kv_heads + kv_head) * D, new_tail_values + offset, lane);
      }
    }
  } else if (AHEAD) {
    start_rows<D, ROWS>(next_keys, key_rows, begin + stream * ROWS, end, lane);
    start_rows<D, ROWS>(next_values, value_rows, begin + stream * ROWS, end, lane);
  }

  // One head for each simdgroup in turn, and the new key as one more head in the part that owns its row.
  const int tasks = in_tail && new_row < end ? G + 1 : G;
  for (int task = simdgroup; task < tasks; task += SIMDGROUPS) {
    const bool is_key = task == G;
    const int column = is_key ? 2 * G * kv_heads + kv_head : 2 * (kv_head * G + task);
    float head[E];
    norm_rope<D, R>(
        proj + column * D, is_key ? k_norm : q_norm, turns, uint(position), lane, eps, head);
    if (is_key) {
      store_head<D>(head, lane, new_tail_keys + new_row * D);
    } else {
#pragma unroll
      for (int i = 0; i < E; ++i) {
        queries[task * D + 32 * i + int(lane)] = bfloat(head[i]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (in_tail) {
    threadgroup_barrier(mem_flags::mem_device);
    if (AHEAD) {
      start_rows<D, ROWS>(next_keys, key_rows, begin + stream * ROWS, end, lane);
      start_rows<D, ROWS>(next_values, value_rows, begin + stream * ROWS, end, lane);
    }
  }

  float query[HEADS][E];
  float sum[HEADS][E];
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    const int head = metal::min(head_set * HEADS + h, G - 1); // a set may be one head short
    if (E == 8) {
      unpack_eight(*(const threadgroup uint4*)(queries + head * D + int(lane) * E), query[h]);
    } else {
#pragma unroll
      for (int e = 0; e < E; ++e) {
        query[h][e] = float(queries[head * D + int(lane) * E + e]);
      }
    }
#pragma unroll
    for (int e = 0; e < E; ++e) {
      query[h][e] *= scale;
      sum[h][e] = 0.0f;
    }
  }

  // Lane l follows row l / PADDED of a block and head l % PADDED.
  float largest = -INFINITY;
  float weight_sum = 0.0f;
  for (int block = begin + stream * ROWS; block < end; block += STREAMS * ROWS) {
    if (!AHEAD) {
      start_rows<D, ROWS>(next_keys, key_rows, block, end, lane);
    }
    float scores[32];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float key[E];
      finish_lane<E>(next_keys[r], key);
#pragma unroll
      for (int h = 0; h < PADDED; ++h) {
        float dot_product = 0.0f;
        if (h < HEADS) {
#pragma unroll
          for (int e = 0; e < E; ++e) {
            dot_product = metal::fma(query[h < HEADS ? h : 0][e], key[e], dot_product);
          }
        }
        scores[r * PADDED + h] = dot_product;
      }
    }
    if (AHEAD) {
      start_rows<D, ROWS>(next_keys, key_rows, block + STREAMS * ROWS, end, lane);
    }
    const float total = simd_sum_each(scores, lane);
    const float score = block + int(lane) / PADDED < end ? total : -INFINITY; // the last row may be there twice
    float block_largest = score;
#pragma unroll
    for (int step = PADDED; step < 32; step *= 2) {
      block_largest = metal::max(block_largest, simd_shuffle_xor(block_largest, ushort(step)));
    }
    block_largest = metal::max(block_largest, largest);
    const float shrink = metal::exp2(largest - block_largest);
    const float weight = metal::exp2(score - block_largest);
    largest = block_largest;
    weight_sum = weight_sum * shrink + weight;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const float head_shrink = simd_shuffle(shrink, ushort(h));
#pragma unroll
      for (int e = 0; e < E; ++e) {
        sum[h][e] *= head_shrink;
      }
    }
    if (!AHEAD) {
      start_rows<D, ROWS>(next_values, value_rows, block, end, lane);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float value[E];
      finish_lane<E>(next_values[r], value);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        const float head_weight = simd_shuffle(weight, ushort(r * PADDED + h));
#pragma unroll
        for (int e = 0; e < E; ++e) {
          sum[h][e] = metal::fma(head_weight, value[e], sum[h][e]);
        }
      }
    }
    if (AHEAD) {
      start_rows<D, ROWS>(next_values, value_rows, block + STREAMS * ROWS, end, lane);
    }
  }
#pragma unroll
  for (int step = PADDED; step < 32; step *= 2) {
    weight_sum += simd_shuffle_xor(weight_sum, ushort(step));
  }

  // The streams of a set agree on the largest score of each head, then add up STAGED heads at a time.
  if (lane < PADDED) {
    maxima[simdgroup * PADDED + int(lane)] = largest;
    sums[simdgroup * PADDED + int(lane)] = weight_sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    float set_largest = -INFINITY;
    for (int s = 0; s < STREAMS; ++s) {
      set_largest = metal::max(set_largest, maxima[(head_set * STREAMS + s) * PADDED + h]);
    }
    float set_sum = 0.0f;
    for (int s = 0; s < STREAMS; ++s) {
      const int entry = (head_set * STREAMS + s) * PADDED + h;
      set_sum += sums[entry] * metal::exp2(maxima[entry] - set_largest);
    }
    const float head_shrink = metal::exp2(maxima[simdgroup * PADDED + h] - set_largest);
#pragma unroll
    for (int e = 0; e < E; ++e) {
      sum[h][e] *= head_shrink;
    }
    const int head = head_set * HEADS + h;
    if (stream == 0 && lane == 0 && head < G) {
      const size_t entry = first_entry + size_t(head) * entry_stride;
      stats[2 * entry] = set_largest;
      stats[2 * entry + 1] = set_sum;
    }
  }
#pragma unroll
  for (int first = 0; first < HEADS; first += STAGED) {
#pragma unroll
    for (int h = 0; h < STAGED; ++h) {
      if (first + h < HEADS) {
#pragma unroll
        for (int e = 0; e < E; ++e) {
          staged[(simdgroup * STAGED + h) * D + int(lane) * E + e] = sum[first + h < HEADS ? first + h : 0][e];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index; i < SETS * STAGED * D; i += SETS * STREAMS * 32) {
      const int set = i / (STAGED * D);
      const int head = set * HEADS + first + i / D % STAGED;
      if (first + i / D % STAGED < HEADS && head < G) {
        float total = 0.0f;
        for (int s = 0; s < STREAMS; ++s) {
          total += staged[(set * STREAMS + s) * STAGED * D + i % (STAGED * D)];
        }
        partial[(first_entry + size_t(head) * entry_stride) * D + i % D] = total;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// What a part without rows leaves.
template <int G>
inline void leave_empty(device float* stats, size_t first_entry, size_t entry_stride, int thread_index) {
  if (thread_index < G) {
    const size_t entry = first_entry + size_t(thread_index) * entry_stride;
    stats[2 * entry] = -INFINITY;
    stats[2 * entry + 1] = 0.0f;
  }
}
#endif
