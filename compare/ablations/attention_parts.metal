// Decode attention over parts of the cache, for the ablations of how keys and values are read.
//
//   s[h, r] = q[h] . k[r] * D^-0.5 * log2(e);  m[h] = max_r s;  stats[h, part] = (m[h], sum_r 2^(s - m))
//   partial[h, part] = sum_r 2^(s - m) v[r];  the stats stand behind all partial sums, in the same output
//
// Grid: (query heads / HEADS, parts). A threadgroup takes HEADS query heads of one KV head; its STREAMS simdgroups
// take blocks of 32 / PADDED rows in turn. A lane holds D / 32 neighbouring dimensions: with COALESCED it loads them
// as 16 bytes, so that a simdgroup reads a row in one go; without, one by one, so that at each load the lanes stand
// D / 16 bytes apart. Parts cover PART rows, first of keys/values, then of the tail; (-inf, 0) for an empty one.
// Bytes: 4 D per row for each threadgroup that reads it, G / HEADS times per KV head.
constexpr int E = D / 32;
constexpr int ROWS = 32 / PADDED;
threadgroup float staged[STREAMS * D];
threadgroup float maxima[STREAMS * PADDED];
threadgroup float sums[STREAMS * PADDED];

const uint lane = thread_index_in_simdgroup;
const int stream = int(simdgroup_index_in_threadgroup);
const int thread_id = int(thread_index_in_threadgroup);
const int first_head = int(threadgroup_position_in_grid.x) * HEADS;
const int kv_head = first_head / G;
const int part = int(threadgroup_position_in_grid.y);
const int parts = int(threadgroups_per_grid.y);
device float* stats = partial + size_t(threadgroups_per_grid.x) * HEADS * parts * D;
const int capacity = keys_shape[1];
const int tail_begin = position[0] / TAIL * TAIL;
const int main_parts = (capacity + PART - 1) / PART;
const bool in_tail = part >= main_parts;
const int begin = (in_tail ? part - main_parts : part) * PART;
const int end = metal::min(begin + PART, in_tail ? position[0] + 1 - tail_begin : tail_begin);
if (begin >= end) {
  if (thread_id < HEADS) {
    const size_t entry = size_t(first_head + thread_id) * parts + part;
    stats[2 * entry] = -INFINITY;
    stats[2 * entry + 1] = 0.0f;
  }
  return;
}
const device bfloat* key_rows = in_tail ? tail_keys + size_t(kv_head) * TAIL * D : keys + size_t(kv_head) * capacity * D;
const device bfloat* value_rows =
    in_tail ? tail_values + size_t(kv_head) * TAIL * D : values + size_t(kv_head) * capacity * D;

float query[HEADS][E];
float sum[HEADS][E];
#pragma unroll
for (int h = 0; h < HEADS; ++h) {
  load_dims<true, E>(q + (first_head + h) * D, lane, query[h]);
#pragma unroll
  for (int e = 0; e < E; ++e) {
    query[h][e] *= SCALE;
    sum[h][e] = 0.0f;
  }
}

// Lane l follows row l / PADDED of a block and head l % PADDED.
float largest = -INFINITY;
float weight_sum = 0.0f;
for (int block = begin + stream * ROWS; block < end; block += STREAMS * ROWS) {
  float scores[32];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float key[E];
    load_dims<COALESCED, E>(key_rows + size_t(metal::min(block + r, end - 1)) * D, lane, key);
#pragma unroll
    for (int h = 0; h < PADDED; ++h) {
      float product = 0.0f;
      if (h < HEADS) {
#pragma unroll
        for (int e = 0; e < E; ++e) {
          product = metal::fma(query[h < HEADS ? h : 0][e], key[e], product);
        }
      }
      scores[r * PADDED + h] = product;
    }
  }
  const float total = simd_sum_each(scores, lane);
  const float score = block + int(lane) / PADDED < end ? total : -INFINITY; // a row beyond the end was read twice
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
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float value[E];
    load_dims<COALESCED, E>(value_rows + size_t(metal::min(block + r, end - 1)) * D, lane, value);
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const float head_weight = simd_shuffle(weight, ushort(r * PADDED + h));
#pragma unroll
      for (int e = 0; e < E; ++e) {
        sum[h][e] = metal::fma(head_weight, value[e], sum[h][e]);
      }
    }
  }
}
#pragma unroll
for (int step = PADDED; step < 32; step *= 2) {
  weight_sum += simd_shuffle_xor(weight_sum, ushort(step));
}

// The streams agree on the largest score of each head, then add up one head after another.
if (lane < PADDED) {
  maxima[stream * PADDED + int(lane)] = largest;
  sums[stream * PADDED + int(lane)] = weight_sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
for (int h = 0; h < HEADS; ++h) {
  float all_largest = -INFINITY;
  for (int s = 0; s < STREAMS; ++s) {
    all_largest = metal::max(all_largest, maxima[s * PADDED + h]);
  }
  const float head_shrink = metal::exp2(maxima[stream * PADDED + h] - all_largest);
#pragma unroll
  for (int e = 0; e < E; ++e) {
    staged[stream * D + int(lane) * E + e] = sum[h][e] * head_shrink;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const size_t entry = size_t(first_head + h) * parts + part;
  for (int dim = thread_id; dim < D; dim += 32 * STREAMS) {
    float total = 0.0f;
    for (int s = 0; s < STREAMS; ++s) {
      total += staged[s * D + dim];
    }
    partial[entry * D + dim] = total;
  }
  if (thread_id == 0) {
    float total = 0.0f;
    for (int s = 0; s < STREAMS; ++s) {
      total += sums[s * PADDED + h] * metal::exp2(maxima[s * PADDED + h] - all_largest);
    }
    stats[2 * entry] = all_largest;
    stats[2 * entry + 1] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
