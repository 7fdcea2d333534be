// Decode attention, first launch: norm, rotation and the new tail row, then each part of the cache on its own, for all
// query heads of a KV head.
//
//   q[h] = rope(rms_norm(proj_q[h]) * q_norm), rounded once to bfloat16
//   new tail: the older rows, then at `position % TAIL` k = rope(rms_norm(proj_k) * k_norm), v = proj_v
//   s[h, r] = q[h] . k[r] * D^-0.5 * log2(e);  m[h] = max_r s;  stats[h, part] = (m[h], sum_r 2^(s - m))
//   partial[h, part] = sum_r 2^(s - m) v[r];  the stats stand behind all partial sums, in the same output
//
// Grid: (KV heads, parts). Parts cover PART rows each, first of keys/values, then of the tail. A part of the tail first
// writes its rows to the new tail and then reads them there; rows after `position % TAIL` stay unwritten. A part without
// rows leaves stats (-inf, 0) and no partial. See attend_part in parts.h.
// Moves 4 * D bytes in per row and KV head, and out per row of the tail; with more than 8 query heads each of the SETS
// sets reads the row again.
constexpr int SIMDGROUPS = SETS * STREAMS;
constexpr int QUERY_WORDS = G * D / 8;
constexpr int STAGED_WORDS = SIMDGROUPS * STAGED * D / 4;
threadgroup uint4 shared_words[QUERY_WORDS > STAGED_WORDS ? QUERY_WORDS : STAGED_WORDS]; // see attend_part
threadgroup float maxima[SIMDGROUPS * PADDED];
threadgroup float sums[SIMDGROUPS * PADDED];

const int thread_index = int(thread_index_in_threadgroup);
const int kv_head = int(threadgroup_position_in_grid.x);
const int part = int(threadgroup_position_in_grid.y);
const int parts = int(threadgroups_per_grid.y);
const int kv_heads = int(threadgroups_per_grid.x);
device float* stats = partial + size_t(kv_heads * G) * parts * D;
const size_t first_entry = size_t(kv_head * G) * parts + part;
const int capacity = keys_shape[1];
const int new_row = position[0] % TAIL;
const int tail_begin = position[0] - new_row;

const int main_parts = (capacity + PART - 1) / PART;
const bool in_tail = part >= main_parts;
const int begin = (in_tail ? part - main_parts : part) * PART;
const int end = metal::min(begin + PART, in_tail ? new_row + 1 : tail_begin);
if (begin >= end) {
  leave_empty<G>(stats, first_entry, size_t(parts), thread_index);
  return;
}
const size_t main_row = size_t(kv_head) * capacity * D;
const size_t tail_row = size_t(kv_head) * TAIL * D;
attend_part<G, D, R, HEADS, PADDED, SETS, STREAMS, STAGED>(
    proj, q_norm, k_norm, turns, in_tail ? tail_keys_out + tail_row : keys + main_row,
    in_tail ? tail_values_out + tail_row : values + main_row, tail_keys + tail_row, tail_values + tail_row,
    tail_keys_out + tail_row, tail_values_out + tail_row, partial, stats, first_entry, size_t(parts), in_tail, begin, end,
    new_row, position[0], kv_head, kv_heads, SCALE, EPS, shared_words, maxima, sums, thread_index,
    int(simdgroup_index_in_threadgroup), thread_index_in_simdgroup);
