// Routing of a short chunk in one launch: the results of select_experts, sort_rows and map_blocks, see there.
// Grid: one threadgroup of 32 * SIMDGROUPS threads, at least as many as experts. Its simdgroups choose the experts of
// the rows in turn; then thread e counts and places the pairs of expert e, in their order, and writes its blocks.
// Bytes: 4 M (E + 1) read, 12 S + 16 capacity written; the S = M * TOP_K pairs are walked twice in threadgroup memory.
constexpr uint THREADS = 32u * uint(SIMDGROUPS);
threadgroup uint chosen[ROWS * TOP_K];
threadgroup uint simdgroup_rows[SIMDGROUPS];
threadgroup uint simdgroup_blocks[SIMDGROUPS];
const uint lane = thread_index_in_simdgroup;
const uint simd_group = simdgroup_index_in_threadgroup;
const uint thread_id = thread_index_in_threadgroup;
const uint tokens = uint(logits_shape[0]);
const uint pairs = tokens * uint(TOP_K);

for (uint row = simd_group; row < tokens; row += uint(SIMDGROUPS)) {
  const uint start = row * uint(E + 1);
  uint keys[PER_LANE];
  for (int i = 0; i < PER_LANE; ++i) {
    const uint id = lane + 32u * uint(i);
    keys[i] = 0u;
    if (id < uint(E)) {
      keys[i] = logit_key(logits[start + id]);
    }
  }
  uint expert;
  float score;
  select_experts<PER_LANE, TOP_K, NORMALISE>(keys, lane, TOP_K, expert, score);
  if (lane < uint(TOP_K)) {
    chosen[row * uint(TOP_K) + lane] = expert;
    experts[row * uint(TOP_K) + lane] = expert;
    scores[row * uint(TOP_K + 1) + lane] = score;
  }
  if (lane == 0u) {
    scores[row * uint(TOP_K + 1) + uint(TOP_K)] = 1.0f / (1.0f + metal::precise::exp(-logits[start + uint(E)]));
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

uint count = 0u;
for (uint p = 0u; p < pairs; ++p) {
  count += chosen[p] == thread_id ? 1u : 0u;
}
const uint own_blocks = (count + uint(TILE_ROWS - 1)) / uint(TILE_ROWS);
const uint rows_to_here = simd_prefix_inclusive_sum(count);
const uint blocks_to_here = simd_prefix_inclusive_sum(own_blocks);
if (lane == 31u) {
  simdgroup_rows[simd_group] = rows_to_here;
  simdgroup_blocks[simd_group] = blocks_to_here;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint shared_blocks = (tokens + uint(TILE_ROWS - 1)) / uint(TILE_ROWS);
uint first = rows_to_here - count;
uint block = shared_blocks + blocks_to_here - own_blocks;
uint used = shared_blocks;
for (uint s = 0u; s < uint(SIMDGROUPS); ++s) {
  used += simdgroup_blocks[s];
  if (s < simd_group) {
    first += simdgroup_rows[s];
    block += simdgroup_blocks[s];
  }
}

if (thread_id < uint(E)) {
  offsets[thread_id] = first;
  if (thread_id == uint(E - 1)) {
    offsets[E] = pairs;
  }
  uint next = first;
  for (uint p = 0u; p < pairs; ++p) {
    if (chosen[p] == thread_id) {
      row_tokens[next] = p / uint(TOP_K);
      slot_rows[p] = next;
      ++next;
    }
  }
  for (uint done = 0u; done < count; done += uint(TILE_ROWS)) {
    blocks[4u * block] = thread_id;
    blocks[4u * block + 1u] = first + done;
    blocks[4u * block + 2u] = metal::min(uint(TILE_ROWS), count - done);
    blocks[4u * block + 3u] = 0u;
    ++block;
  }
}
const uint capacity = shared_blocks + (pairs + uint(TILE_ROWS - 1)) / uint(TILE_ROWS) + metal::min(uint(E), pairs);
for (uint entry = thread_id; entry < capacity; entry += THREADS) {
  const bool is_shared = entry < shared_blocks;
  if (is_shared || entry >= used) {
    const uint start = entry * uint(TILE_ROWS);
    blocks[4u * entry] = uint(E);
    blocks[4u * entry + 1u] = is_shared ? pairs + start : 0u;
    blocks[4u * entry + 2u] = is_shared ? metal::min(uint(TILE_ROWS), tokens - start) : 0u;
    blocks[4u * entry + 3u] = 0u;
  }
}
