// Appends a chunk that completes a block of TAIL rows: new keys and values, and a new tail.
//
// Grid: (threads over all rows and D / 8 pieces of 16 bytes, KV heads). A thread owns one piece of one row, in keys and
// values or in the tail. Other rows stay unwritten. Moves 4 * D bytes in and out per row and KV head.
const int piece = int(thread_position_in_grid.x) % (D / 8);
const int row = int(thread_position_in_grid.x) / (D / 8);
const int head = int(thread_position_in_grid.y);
const int length = position[0] + k_shape[0];
if (row < length) {
  RowSource source;
  source.length = position[0];
  source.tail_begin = position[0] / TAIL * TAIL;
  source.capacity = keys_shape[1];
  source.head = head;
  const device bfloat* key = source_row<D, TAIL>(source, row, keys, tail_keys, k + head * D, HKV * D);
  const device bfloat* value = source_row<D, TAIL>(source, row, values, tail_values, proj + VALUES + head * D, P);
  const int tail_begin = length / TAIL * TAIL;
  if (row < tail_begin) {
    const size_t offset = (size_t(head) * CAPACITY + row) * D;
    ((device uint4*)(keys_out + offset))[piece] = ((const device uint4*)key)[piece];
    ((device uint4*)(values_out + offset))[piece] = ((const device uint4*)value)[piece];
  } else {
    const int offset = (head * TAIL + row - tail_begin) * D;
    ((device uint4*)(tail_keys_out + offset))[piece] = ((const device uint4*)key)[piece];
    ((device uint4*)(tail_values_out + offset))[piece] = ((const device uint4*)value)[piece];
  }
}
