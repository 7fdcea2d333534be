// Rows of a key/value cache brought into threadgroup memory.
#ifndef LILY_ATTENTION_KEY_VALUE_ROWS
#define LILY_ATTENTION_KEY_VALUE_ROWS

struct KeyValueRows {
  int length;     // tokens of the sequence
  int tail_begin; // of them in keys and values; the rest are in the tail
  int capacity;   // rows of keys and values
  int head;       // KV head
};

// tile[r, 0..SLICE) = row `first` + r, dimensions `column` on. Rows from `end` on become 0: the cache is undefined there.
template <int D, int TAIL, int KEYS, int SLICE, int STRIDE, int THREADS>
inline void load_rows(
    threadgroup bfloat* tile,
    const device bfloat* main,
    const device bfloat* tail,
    KeyValueRows cache,
    int first,
    int end,
    int column,
    int thread_id) {
  constexpr int PIECES = SLICE / 8;
  for (int i = thread_id; i < KEYS * PIECES; i += THREADS) {
    const int row = first + i / PIECES;
    const int piece = i % PIECES;
    uint4 values = uint4(0u);
    if (row < end) {
      const device bfloat* source = row < cache.tail_begin
          ? main + (size_t(cache.head) * cache.capacity + row) * D
          : tail + (size_t(cache.head) * TAIL + (row - cache.tail_begin)) * D;
      values = *(const device uint4*)(source + column + piece * 8);
    }
    *(threadgroup uint4*)(tile + i / PIECES * STRIDE + piece * 8) = values;
  }
}
#endif
