// The operands of a matrix product on their way from device to threadgroup memory. Needs quantized.h before it.
//
// A tile has ROWS rows of BK bfloat values, STRIDE apart. Its threads first read their share into registers (read),
// which may be long before the tile is free, then write it to the tile (store), dequantising the weights. So one tile
// in threadgroup memory and AHEAD tiles in registers overlap the reads with the products.
// Rows beyond the last valid one repeat that one: their products exist and are not used.
#ifndef LILY_OPERANDS
#define LILY_OPERANDS

// Most pieces that one of THREADS threads carries.
#define LILY_SHARE(PIECES, THREADS) (((PIECES) + (THREADS)-1) / (THREADS))

// ---- activations: pieces of 8 values ------------------------------------------------------------------

template <int COUNT, int AHEAD>
struct RowPieces {
  uint starts[COUNT]; // where a piece of column 0 stands in the array, in pieces
  uint4 values[AHEAD][COUNT];
};

// Consecutive rows of an array [*, WIDTH], from row 0 of it on.
template <int ROWS, int BK, int WIDTH, int THREADS, int COUNT, int AHEAD>
inline void locate_rows(thread RowPieces<COUNT, AHEAD>& pieces, int rows_valid, int thread_id) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    int piece = thread_id + THREADS * i;
    int row = metal::min(piece / (BK / 8), rows_valid - 1);
    pieces.starts[i] = uint(row) * uint(WIDTH / 8) + uint(piece % (BK / 8));
  }
}

// Rows row_ids[0 .. rows_valid) of an array [*, WIDTH].
template <int ROWS, int BK, int WIDTH, int THREADS, int COUNT, int AHEAD>
inline void locate_gathered_rows(
    thread RowPieces<COUNT, AHEAD>& pieces, const threadgroup uint* row_ids, int rows_valid, int thread_id) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    int piece = thread_id + THREADS * i;
    uint row = row_ids[metal::min(piece / (BK / 8), rows_valid - 1)];
    pieces.starts[i] = row * uint(WIDTH / 8) + uint(piece % (BK / 8));
  }
}

// Reads the pieces from `column` on into the place `slot` of AHEAD.
template <int COUNT, int AHEAD>
inline void read_rows(thread RowPieces<COUNT, AHEAD>& pieces, const device bfloat* source, int column, int slot) {
  const device uint4* vectors = (const device uint4*)source;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    pieces.values[slot][i] = vectors[size_t(pieces.starts[i]) + size_t(column / 8)];
  }
}

template <int ROWS, int BK, int STRIDE, int THREADS, int COUNT, int AHEAD>
inline void store_rows(
    threadgroup bfloat* tile, const thread RowPieces<COUNT, AHEAD>& pieces, int slot, int thread_id) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    int piece = thread_id + THREADS * i;
    if (ROWS * (BK / 8) % THREADS == 0 || piece < ROWS * (BK / 8)) {
      *(threadgroup uint4*)(tile + piece / (BK / 8) * STRIDE + piece % (BK / 8) * 8) = pieces.values[slot][i];
    }
  }
}

// ---- weights: units of 32 codes -----------------------------------------------------------------------

template <int BITS, int COUNT>
struct WeightUnits {
  Codes<BITS> codes[COUNT];
  bfloat scales[COUNT];
  bfloat biases[COUNT];
};

// Units from `column` on of weight rows [ROWS, K], of which rows_valid exist.
template <int BITS, int GROUP, int K, int ROWS, int BK, int THREADS, int COUNT>
inline void read_units(
    thread WeightUnits<BITS, COUNT>& units,
    const device uint* weight,
    const device bfloat* scales,
    const device bfloat* biases,
    int rows_valid,
    int column,
    int thread_id) {
  constexpr int UNITS = BK / UNIT;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    int index = thread_id + THREADS * i;
    int row = metal::min(index / UNITS, rows_valid - 1);
    int unit = column / UNIT + index % UNITS;
    units.codes[i] = load_codes<BITS>(weight + size_t(row) * (K / UNIT * BITS) + unit * BITS);
    size_t group = size_t(row) * (K / GROUP) + unit / (GROUP / UNIT);
    units.scales[i] = scales[group];
    units.biases[i] = biases[group];
  }
}

// Writes the units, dequantised and rounded to bfloat16.
template <int BITS, int ROWS, int BK, int STRIDE, int THREADS, int COUNT>
inline void store_units(threadgroup bfloat* tile, const thread WeightUnits<BITS, COUNT>& units, int thread_id) {
  constexpr int UNITS = BK / UNIT;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    int index = thread_id + THREADS * i;
    if (ROWS * UNITS % THREADS == 0 || index < ROWS * UNITS) {
      threadgroup uint4* target = (threadgroup uint4*)(tile + index / UNITS * STRIDE + index % UNITS * UNIT);
      float values[UNIT];
      dequantize_unit<BITS>(units.codes[i], float(units.scales[i]), float(units.biases[i]), values);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        target[j] = pack_eight(&values[8 * j]);
      }
    }
  }
}
#endif
