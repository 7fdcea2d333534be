// Decode attention of several sequences, first launch: norm, rotation and the new tail rows, then each page of each
// sequence on its own, for all query heads of a KV head. The formulas are step_parts.metal's.
//
// keys and values are pools of pages of TAIL rows, [pages, KV heads, TAIL, D]. The work is a list of items (sequence,
// page), where page -1 is the sequence's tail, in which the new token's row is, and page -2 its page that is not in the
// pool yet; an item of sequence -1 is unused. Row b of proj, row b of `places` (position, first item, items, 0) and
// slice b of the tails and of young_keys and young_values are sequence b's.
//   partial[item, h] = sum_r 2^(s - m) v[r];  stats[item, h] = (m, sum_r 2^(s - m)), behind all partial sums
//
// Grid: (KV heads, items). An item of the tail writes the new tail and then reads it; rows after `position % TAIL` stay
// unwritten, as do the partial results of unused items. See attend_part in parts.h.
// Moves 4 * D bytes in per row and KV head, and out per row of the tails.
constexpr int SIMDGROUPS = SETS * STREAMS;
constexpr int QUERY_WORDS = G * D / 8;
constexpr int STAGED_WORDS = SIMDGROUPS * STAGED * D / 4;
threadgroup uint4 shared_words[QUERY_WORDS > STAGED_WORDS ? QUERY_WORDS : STAGED_WORDS]; // see attend_part
threadgroup float maxima[SIMDGROUPS * PADDED];
threadgroup float sums[SIMDGROUPS * PADDED];

const int kv_head = int(threadgroup_position_in_grid.x);
const int kv_heads = int(threadgroups_per_grid.x);
const size_t item = threadgroup_position_in_grid.y;
const int sequence = items[2 * item];
const int page = items[2 * item + 1];
if (sequence < 0) {
  return;
}
device float* stats = partial + size_t(threadgroups_per_grid.y) * (kv_heads * G) * D;
const int position = places[4 * sequence];
const int new_row = position % TAIL;
const bool in_tail = page == -1;
const size_t tail_row = (size_t(sequence) * kv_heads + kv_head) * TAIL * D;
const size_t page_row = page < 0 ? tail_row : (size_t(page) * kv_heads + kv_head) * TAIL * D;
const device bfloat* page_keys = (page < 0 ? young_keys : keys) + page_row;
const device bfloat* page_values = (page < 0 ? young_values : values) + page_row;
attend_part<G, D, R, HEADS, PADDED, SETS, STREAMS, STAGED>(
    proj + size_t(sequence) * P, q_norm, k_norm, turns, in_tail ? tail_keys_out + tail_row : page_keys,
    in_tail ? tail_values_out + tail_row : page_values, tail_keys + tail_row, tail_values + tail_row,
    tail_keys_out + tail_row, tail_values_out + tail_row, partial, stats, (item * kv_heads + kv_head) * G, size_t(1),
    in_tail, 0, in_tail ? new_row + 1 : TAIL, new_row, position, kv_head, kv_heads, SCALE, EPS, shared_words, maxima, sums,
    int(thread_index_in_threadgroup), int(simdgroup_index_in_threadgroup), thread_index_in_simdgroup);
