// Block map of the grouped matmuls: each block is at most TILE_ROWS consecutive sorted rows of one expert.
//   blocks[b] = (expert, first row, row count, 0). Shared expert first: expert E, rows S + TILE_ROWS * b, for
//   ceil(M / TILE_ROWS) blocks; then the routed experts in order; unused entries have a row count of 0.
// Capacity: ceil(M / TILE_ROWS) + ceil(S / TILE_ROWS) + min(E, S) entries, enough for any routing.
// Grid: one thread per entry; threadgroups of E to 512 threads. Every threadgroup scans the E block counts
// itself, then each thread finds its expert by bisection, so skew costs nothing.
// Bytes: 4 (E + 1) read per threadgroup, 16 written per entry.
threadgroup uint ends[512];
threadgroup uint simdgroup_totals[16];
const uint lane = thread_index_in_simdgroup;
const uint simd_group = simdgroup_index_in_threadgroup;
const uint thread_id = thread_index_in_threadgroup;
const uint tokens = uint(experts_shape[0]);
const uint pairs = tokens * uint(experts_shape[1]);
const uint count_of_experts = uint(offsets_shape[0]) - 1u;

// ends[e] = number of blocks of the experts 0 to e.
uint own = 0u;
if (thread_id < count_of_experts) {
  own = (offsets[thread_id + 1u] - offsets[thread_id] + uint(TILE_ROWS - 1)) / uint(TILE_ROWS);
}
const uint inclusive = simd_prefix_inclusive_sum(own);
if (lane == 31u) {
  simdgroup_totals[simd_group] = inclusive;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
uint before = 0u;
for (uint s = 0u; s < simd_group; ++s) {
  before += simdgroup_totals[s];
}
ends[thread_id] = before + inclusive;
threadgroup_barrier(mem_flags::mem_threadgroup);

const uint shared_blocks = (tokens + uint(TILE_ROWS - 1)) / uint(TILE_ROWS);
const uint capacity = shared_blocks + (pairs + uint(TILE_ROWS - 1)) / uint(TILE_ROWS) + metal::min(count_of_experts, pairs);
const uint entry = thread_position_in_grid.x;
if (entry < capacity) {
  uint owner = count_of_experts;
  uint first = 0u;
  uint count = 0u;
  if (entry < shared_blocks) {
    first = pairs + entry * uint(TILE_ROWS);
    count = metal::min(uint(TILE_ROWS), pairs + tokens - first);
  } else if (entry - shared_blocks < ends[count_of_experts - 1u]) {
    const uint block = entry - shared_blocks;
    uint low = 0u;  // the first expert whose blocks end after `block`
    uint high = count_of_experts - 1u;
    while (low < high) {
      const uint middle = (low + high) / 2u;
      if (ends[middle] > block) {
        high = middle;
      } else {
        low = middle + 1u;
      }
    }
    owner = low;
    const uint first_block = low > 0u ? ends[low - 1u] : 0u;
    first = offsets[low] + (block - first_block) * uint(TILE_ROWS);
    count = metal::min(uint(TILE_ROWS), offsets[low + 1u] - first);
  }
  blocks[4u * entry] = owner;
  blocks[4u * entry + 1u] = first;
  blocks[4u * entry + 2u] = count;
  blocks[4u * entry + 3u] = 0u;
}
