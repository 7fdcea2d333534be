// Appends a chunk that leaves keys and values as they are: a new tail from the old one and the chunk.
//
// Grid: (threads over rows and D / 8 pieces of 16 bytes, KV heads). A thread owns one piece of one tail row in both
// outputs. Rows after the last token stay unwritten. Moves 4 * D bytes in and out per row and KV head.
const int piece = int(thread_position_in_grid.x) % (D / 8);
const int tail_row = int(thread_position_in_grid.x) / (D / 8);
const int head = int(thread_position_in_grid.y);
const int tokens = k_shape[0];
const int before = position[0] % TAIL;
if (tail_row < before + tokens) {
  RowSource source;
  source.length = before;
  source.tail_begin = 0;
  source.capacity = 0;
  source.head = head;
  const device bfloat* key = source_row<D, TAIL>(source, tail_row, tail_keys, tail_keys, k + head * D, HKV * D);
  const device bfloat* value =
      source_row<D, TAIL>(source, tail_row, tail_values, tail_values, proj + VALUES + head * D, P);
  const int offset = (head * TAIL + tail_row) * D;
  ((device uint4*)(tail_keys_out + offset))[piece] = ((const device uint4*)key)[piece];
  ((device uint4*)(tail_values_out + offset))[piece] = ((const device uint4*)value)[piece];
}
