// out[g] = sum of all 32-bit words that simdgroup g reads: what reading alone costs.
//
// A matrix of the stack is WORDS pieces of 16 bytes of codes and GROUPS of scales and as many of biases, which
// start at pieces SCALES and BIASES of the array. SLOTS * MATRICES matrices are read. A simdgroup takes a share, one of BLOCKS, of each of the MATRICES matrices of its slot, 16 bytes a
// lane. Grid: any number of threadgroups of SIMDGROUPS simdgroups, SLOTS * BLOCKS simdgroups in all.
// `previous` is not read: it is there so that a launch waits for the one before it.
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = threadgroup_position_in_grid.x * uint(SIMDGROUPS) + simdgroup_index_in_threadgroup;
const uint slot = simdgroup / uint(BLOCKS);
const uint block = simdgroup % uint(BLOCKS);
uint sum = 0u;
for (int m = 0; m < MATRICES; ++m) {
  const size_t matrix = size_t(matrices[slot * uint(MATRICES) + uint(m)]);
  const device uint4* words = (const device uint4*)(weight) + matrix * size_t(WORDS);
  const device uint4* first = (const device uint4*)(weight) + size_t(SCALES) + matrix * size_t(GROUPS);
  const device uint4* second = (const device uint4*)(weight) + size_t(BIASES) + matrix * size_t(GROUPS);
  sum += read_share<WORDS, BLOCKS>(words, block, lane);
  sum += read_share<GROUPS, BLOCKS>(first, block, lane);
  sum += read_share<GROUPS, BLOCKS>(second, block, lane);
}
sum = simd_sum(sum);
if (lane == 0u) {
  out[simdgroup] = sum;
}
