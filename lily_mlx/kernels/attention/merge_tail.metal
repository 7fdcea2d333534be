// Moves a full tail into new keys and values: rows before the tail from the old ones, the last TAIL from the tail.
//
// Grid: (threads over all rows and D / 8 pieces of 16 bytes, KV heads). A thread owns one piece of one row in both
// outputs. Rows after `length` stay unwritten. Moves 4 * D bytes in and out per row and KV head.
const int piece = int(thread_position_in_grid.x) % (D / 8);
const int row = int(thread_position_in_grid.x) / (D / 8);
const int head = int(thread_position_in_grid.y);
if (row < length[0]) {
  RowSource source;
  source.length = length[0];
  source.tail_begin = length[0] - TAIL;
  source.capacity = keys_shape[1];
  source.head = head;
  const device bfloat* key = source_row<D, TAIL>(source, row, keys, tail_keys, tail_keys, D);
  const device bfloat* value = source_row<D, TAIL>(source, row, values, tail_values, tail_values, D);
  const size_t offset = (size_t(head) * CAPACITY + row) * D;
  ((device uint4*)(keys_out + offset))[piece] = ((const device uint4*)key)[piece];
  ((device uint4*)(values_out + offset))[piece] = ((const device uint4*)value)[piece];
}
