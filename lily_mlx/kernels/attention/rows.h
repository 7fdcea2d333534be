// Where row `row` of a sequence lives before a chunk is appended: cache, tail, or the chunk itself.
#ifndef LILY_ATTENTION_ROWS
#define LILY_ATTENTION_ROWS

struct RowSource {
  int length;     // tokens before the chunk
  int tail_begin; // of them in keys and values
  int capacity;   // rows of keys and values
  int head;       // KV head
};

// `chunk` points to the head's first new row; its rows are `stride` elements apart.
template <int D, int TAIL>
inline const device bfloat* source_row(
    RowSource source,
    int row,
    const device bfloat* main,
    const device bfloat* tail,
    const device bfloat* chunk,
    int stride) {
  if (row < source.tail_begin) {
    return main + (size_t(source.head) * source.capacity + row) * D;
  }
  if (row < source.length) {
    return tail + (size_t(source.head) * TAIL + (row - source.tail_begin)) * D;
  }
  return chunk + size_t(row - source.length) * stride;
}
#endif
