// Decode: rows[s, n] = dot(weight[expert[s], n], hidden[s]), slot TOP_K by the shared expert; not yet weighted. The experts
// come first in `routing`.
// Grid: (blocks of rows, TOP_K + 1 slots), SIMDGROUPS simdgroups.
// Bytes: the matrix of TOP_K + 1 experts once, 4 N (TOP_K + 1) written.
const uint lane = thread_index_in_simdgroup;
const uint slot = threadgroup_position_in_grid.y;
const int block = int(threadgroup_position_in_grid.x) * SIMDGROUPS + int(simdgroup_index_in_threadgroup);
const int first = set_row<ROWS, LANES>(block, lane);
const device bfloat* input = hidden + size_t(slot) * K;
const int row_lane = int(lane) % LANES;
int own_rows[ROWS];
float sums[ROWS];
begin_rows<N, ROWS>(own_rows, sums, first);
if (slot < uint(TOP_K)) {
  const size_t row = size_t(metal::min(uint(routing[slot]), uint(E) - 1u)) * N;
  add_rows<BITS, GROUP, K, ROWS, LANES>(
      sums, input, weight + row * (K / UNIT * BITS),
      scales_of<BITS, GROUP, K>(weight, size_t(E) * N) + row * (K / GROUP),
      biases_of<BITS, GROUP, K>(weight, size_t(E) * N) + row * (K / GROUP), own_rows, row_lane);
} else {
  add_rows<SHARED_BITS, SHARED_GROUP, K, ROWS, LANES>(
      sums, input, shared_weight, scales_of<SHARED_BITS, SHARED_GROUP, K>(shared_weight, N),
      biases_of<SHARED_BITS, SHARED_GROUP, K>(shared_weight, N), own_rows, row_lane);
}
write_rows<N, ROWS, LANES>(rows + size_t(slot) * N, sums, first, lane);
