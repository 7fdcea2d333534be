// Decode attention, first launch: each part of the cache on its own, for all query heads of a KV head.
//
//   s[h, r] = q[h] . k[r] * D^-0.5 * log2(e);  m[h] = max_r s;  stats[h, part] = (m[h], sum_r 2^(s - m))
//   partial[h, part] = sum_r 2^(s - m) v[r]
//
// Grid: (KV heads, parts). Parts cover PART rows each, first of keys/values, then of the tail. A part without rows
// leaves stats (-inf, 0) and no partial. A simdgroup keeps q and the sums of HEADS heads in registers, D / 32
// dimensions per lane, and streams every STREAMS-th block of ROWS rows: one block yields 32 scores, one per lane.
// Moves 4 * D bytes per row and KV head; with more than 8 query heads each of the SETS sets reads the row again.
constexpr int E = D / 32;
constexpr int ROWS = 32 / PADDED;
threadgroup float staged[SETS * STREAMS * STAGED * D];
threadgroup float maxima[SETS * STREAMS * PADDED];
threadgroup float sums[SETS * STREAMS * PADDED];

const uint lane = thread_index_in_simdgroup;
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int thread_index = int(thread_index_in_threadgroup);
const int head_set = simdgroup / STREAMS;
const int stream = simdgroup % STREAMS;
const int kv_head = int(threadgroup_position_in_grid.x);
const int part = int(threadgroup_position_in_grid.y);
const int parts = int(threadgroups_per_grid.y);
const int capacity = keys_shape[1];
const int tail_begin = position[0] / TAIL * TAIL;

const int main_parts = (capacity + PART - 1) / PART;
const bool in_tail = part >= main_parts;
const int begin = (in_tail ? part - main_parts : part) * PART;
const int rows = in_tail ? position[0] + 1 - tail_begin : tail_begin;
const int end = metal::min(begin + PART, rows);
if (begin >= end) {
  if (thread_index < G) {
    const size_t entry = size_t(kv_head * G + thread_index) * parts + part;
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
  const int head = metal::min(head_set * HEADS + h, G - 1); // a set may be one head short
  load_lane<E>(q + (kv_head * G + head) * D, lane, query[h]);
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
    load_lane<E>(key_rows + size_t(metal::min(block + r, end - 1)) * D, lane, key); // the last row again, masked below
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
  const float total = simd_sum_each(scores, lane);
  const float score = block + int(lane) / PADDED < end ? total : -INFINITY;
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
    load_lane<E>(value_rows + size_t(metal::min(block + r, end - 1)) * D, lane, value);
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
    const size_t entry = size_t(kv_head * G + head) * parts + part;
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
      partial[(size_t(kv_head * G + head) * parts + part) * D + i % D] = total;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
