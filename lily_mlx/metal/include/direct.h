// Products of a few rows of x with quantised weights that go from memory to registers and nowhere else:
//   acc[n, m] += sum_k bfloat(w[n, k]) * x[m, k]
// Needs fragment.h, tile.h and quantized.h before it.
//
// The weights are the left operand of the matrix instructions. A simdgroup takes bands of 16 weight rows, 128 columns
// (four units) at a time: lane l reads unit column(l) / 2 of the rows row(l) and row(l) + 8, where row(l) and column(l)
// is the place of its first element in a tile. It hands the codes of its unit to the fragments in their order, so a
// fragment's columns are not 8 neighbours of K; x stands in threadgroup memory in the same order (direct_place).
// So each code is read and dequantised once for all rows of x, and only x passes through threadgroup memory.
#ifndef LILY_DIRECT
#define LILY_DIRECT

constant constexpr int DIRECT_UNITS = 4;
constant constexpr int DIRECT_COLUMNS = DIRECT_UNITS * UNIT;
constant constexpr int DIRECT_STEP = 16; // columns of a product

// Where a column of x stands within its row of the tile.
inline int direct_place(int column) {
  return column / DIRECT_COLUMNS * DIRECT_COLUMNS + column % UNIT / 2 * 8 + column / UNIT % DIRECT_UNITS * 2 + column % 2;
}

// Rows of x, as direct_product takes them: these three functions, here for rows of x [*, K] with the numbers in x_rows.
// Another kind of rows has its own, see kernels/linear/norm_rows.h.

// Called once by all threads before the first row is read; what it leaves is used after a barrier.
template <int K, int TOKENS, int SIMDGROUPS>
inline void direct_prepare(const device bfloat* x, const threadgroup uint* x_rows, int rows_valid, uint lane) {}

// Piece `piece` of DEPTH columns from column `first` on: 8 columns of one of the rows; zeros beyond K.
template <int K, int DEPTH>
inline uint4 direct_piece(const device bfloat* x, const threadgroup uint* x_rows, int piece, int first) {
  const int column = first + piece % (DEPTH / 8) * 8;
  if (K % DEPTH != 0 && column >= K) {
    return uint4(0u);
  }
  return ((const device uint4*)(x + size_t(x_rows[piece / (DEPTH / 8)]) * K))[column / 8];
}

// The values of a piece that are multiplied. Called once for each.
template <int K, int DEPTH>
inline uint4 direct_values(const threadgroup uint* x_rows, int piece, int first, uint4 values) {
  return values;
}

// A piece to its place in a tile whose rows are DEPTH + 8 apart.
template <int DEPTH>
inline void direct_put(threadgroup bfloat* tile, int piece, uint4 values) {
  const int place = piece / (DEPTH / 8) * (DEPTH + 8) + direct_place(piece % (DEPTH / 8) * 8);
  threadgroup uint* target = (threadgroup uint*)(tile + place);
  target[0] = values.x;
  target[4] = values.y;
  target[8] = values.z;
  target[12] = values.w;
}

// 16 weight rows from row `first` of a matrix on.
struct DirectBand {
  const device uint* weight;
  const device bfloat* scales;
  const device bfloat* biases;
  int first;
};

// A lane's units of the bands: rows first + row(l) and first + row(l) + 8, of which `rows_valid` of the matrix exist
// (others repeat the last: drop their sums). Units beyond K count as zeros.
template <int BITS, int GROUP, int K, int BANDS>
inline void direct_load(
    thread RowUnits<BITS, 2> (&units)[BANDS],
    const thread DirectBand (&bands)[BANDS],
    int rows_valid,
    int block,
    uint lane) {
  const int unit = DIRECT_UNITS * block + Tile<16, DIRECT_STEP>::column(0, lane) / 2;
#pragma unroll
  for (int b = 0; b < BANDS; ++b) {
    int rows[2];
    rows[0] = metal::min(bands[b].first + Tile<16, DIRECT_STEP>::row(0, lane), rows_valid - 1);
    rows[1] = metal::min(bands[b].first + Tile<16, DIRECT_STEP>::row(0, lane) + 8, rows_valid - 1);
    load_row_units<BITS, GROUP, K, 2>(
        units[b], metal::min(unit, K / UNIT - 1), bands[b].weight, bands[b].scales, bands[b].biases, rows);
    if (K % DIRECT_COLUMNS != 0 && unit >= K / UNIT) {
      for (int i = 0; i < 2; ++i) {
        units[b].scales[i] = bfloat(0.0f);
        units[b].biases[i] = bfloat(0.0f);
      }
    }
  }
}

// The i-th weight of a unit; `i` is a constant once loops are unrolled. The same values as dequantize_unit's.
template <int BITS>
inline float direct_weight(const thread Codes<BITS>& codes, int i, float scale, float bias) {
  if (BITS == 16) {
    const uint pair = codes.words[i / 2 % BITS];
    return i % 2 == 0 ? unpack_low(pair) : unpack_high(pair);
  }
  if (BITS == 4) {
    const uint word = codes.words[i / 8 % BITS];
    const int place = i % 8;
    if (place == 0) {
      return dequantize_in_place<12>(word << 12, scale, bias);
    }
    if (place == 1) {
      return dequantize_in_place<12>(word << 8, scale, bias);
    }
    if (place == 2) {
      return dequantize_in_place<16>(word << 8, scale, bias);
    }
    if (place == 3) {
      return dequantize_in_place<12>(word, scale, bias);
    }
    if (place == 4) {
      return dequantize_in_place<16>(word, scale, bias);
    }
    if (place == 5) {
      return dequantize_in_place<12>(word >> 8, scale, bias);
    }
    if (place == 6) {
      return dequantize_in_place<16>(word >> 8, scale, bias);
    }
    return dequantize_in_place<12>(word >> 16, scale, bias);
  }
  return metal::fma(scale, code_at<BITS>(codes, i), bias);
}

// acc += the bands' 128 columns times those of x, which starts in the tile at `x`, with rows `stride` apart. Rows of x
// are taken in COUNT groups of WIDTH, each with a tile of sums; groups beyond the last row are left out.
template <int BITS, int BANDS, int WIDTH, int COUNT>
inline void direct_multiply(
    thread Tile<16 * BANDS, WIDTH> (&acc)[COUNT],
    const thread RowUnits<BITS, 2> (&units)[BANDS],
    const threadgroup bfloat* x,
    int stride,
    int rows_valid) {
#pragma unroll
  for (int step = 0; step < DIRECT_COLUMNS / DIRECT_STEP; ++step) {
    Tile<16 * BANDS, DIRECT_STEP> values;
#pragma unroll
    for (int i = 0; i < Tile<16 * BANDS, DIRECT_STEP>::ELEMENTS; ++i) {
      const int row = Tile<16 * BANDS, DIRECT_STEP>::row(i, 0u) / 8;
      const int column = Tile<16 * BANDS, DIRECT_STEP>::column(i, 0u);
      const int code = (DIRECT_STEP * step + column / 8 * 8) / DIRECT_UNITS + column % 2;
      values.set(
          i, direct_weight<BITS>(
                 units[row / 2].codes[row % 2], code, float(units[row / 2].scales[row % 2]),
                 float(units[row / 2].biases[row % 2])));
    }
    TileOperand<16 * BANDS, DIRECT_STEP> operand;
    round_operand(operand, values);
#pragma unroll
    for (int g = 0; g < COUNT; ++g) {
      if (g == 0 || WIDTH * g < rows_valid) {
        tile_multiply_transposed<16 * BANDS, WIDTH, DIRECT_STEP>(
            acc[g], operand, x + WIDTH * g * stride + DIRECT_STEP * step, stride);
      }
    }
  }
}

// acc = the bands times all of x [*, K], for the `rows_valid` rows of x in `x_rows`, at most TOKENS. Of every DEPTH
// columns, which all threads of the threadgroup stage in `tile`, this simdgroup takes the slice-th of SIMD_K parts. Its
// next AHEAD units of each row are on their way in registers: a part of its share of a stage, or all of some stages.
// Where X_AHEAD also the threads' next pieces of x: that pays where x has many rows. `weight_rows` rows of the matrix
// exist.
template <
    int BITS, int GROUP, int K, int BANDS, int TOKENS, int DEPTH, int SIMD_K, int AHEAD, bool X_AHEAD, int THREADS,
    int WIDTH, int COUNT, typename ROWS>
inline void direct_product(
    thread Tile<16 * BANDS, WIDTH> (&acc)[COUNT],
    threadgroup bfloat* tile,
    const device bfloat* x,
    ROWS x_rows,
    int rows_valid,
    const thread DirectBand (&bands)[BANDS],
    int weight_rows,
    int slice,
    uint lane,
    int thread_id) {
  constexpr int BLOCKS = DEPTH / DIRECT_COLUMNS;
  constexpr int SHARE = BLOCKS / SIMD_K;
  constexpr int STAGES = AHEAD > SHARE ? AHEAD / SHARE : 1; // written out, so that `ahead` stays in registers
  constexpr int PIECES = X_AHEAD ? (TOKENS * DEPTH / 8 + THREADS - 1) / THREADS : 1;
  const int pieces_valid = rows_valid * (DEPTH / 8);
  RowUnits<BITS, 2> ahead[AHEAD][BANDS];
  uint4 pieces[PIECES];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    direct_load<BITS, GROUP, K, BANDS>(
        ahead[i], bands, weight_rows, i / SHARE * BLOCKS + slice * SHARE + i % SHARE, lane);
  }
  if (X_AHEAD) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      pieces[i] = direct_piece<K, DEPTH>(x, x_rows, metal::min(thread_id + THREADS * i, pieces_valid - 1), 0);
    }
  }
#pragma unroll
  for (int g = 0; g < COUNT; ++g) {
    acc[g].clear();
  }
  // Sums of rows that x does not have are not used, but those of a group's last rows are computed.
  for (int i = thread_id; i < (TOKENS - rows_valid) * (DEPTH + 8) / 8; i += THREADS) {
    ((threadgroup uint4*)tile)[rows_valid * (DEPTH + 8) / 8 + i] = uint4(0u);
  }
  direct_prepare<K, TOKENS, THREADS / 32>(x, x_rows, rows_valid, lane);
  for (int first_stage = 0; first_stage < K; first_stage += STAGES * DEPTH) {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      const int start = first_stage + stage * DEPTH;
      if (stage == 0 || start < K) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (X_AHEAD) {
#pragma unroll
          for (int i = 0; i < PIECES; ++i) {
            const int piece = thread_id + THREADS * i;
            if (piece < pieces_valid) {
              direct_put<DEPTH>(tile, piece, direct_values<K, DEPTH>(x_rows, piece, start, pieces[i]));
            }
          }
        } else {
          for (int piece = thread_id; piece < pieces_valid; piece += THREADS) {
            const uint4 values = direct_piece<K, DEPTH>(x, x_rows, piece, start);
            direct_put<DEPTH>(tile, piece, direct_values<K, DEPTH>(x_rows, piece, start, values));
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (X_AHEAD && start + DEPTH < K) {
#pragma unroll
          for (int i = 0; i < PIECES; ++i) {
            const int piece = metal::min(thread_id + THREADS * i, pieces_valid - 1);
            pieces[i] = direct_piece<K, DEPTH>(x, x_rows, piece, start + DEPTH);
          }
        }
        const int first = start / DIRECT_COLUMNS + slice * SHARE;
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
          const int place = (stage * SHARE + i) % AHEAD;
          if (K % DEPTH == 0 || (first + i) * DIRECT_COLUMNS < K) {
            direct_multiply<BITS, BANDS, WIDTH, COUNT>(
                acc, ahead[place], tile + (slice * SHARE + i) * DIRECT_COLUMNS, DEPTH + 8, rows_valid);
          }
          const int next = first + (i + AHEAD) / SHARE * BLOCKS + (i + AHEAD) % SHARE;
          if (next * DIRECT_COLUMNS < K) {
            direct_load<BITS, GROUP, K, BANDS>(ahead[place], bands, weight_rows, next, lane);
          }
        }
      }
    }
  }
}

// A simdgroup's sums to [16 * BANDS, WIDTH] floats, whose rows are WIDTH + 1 apart.
template <int BANDS, int WIDTH>
inline void direct_store(threadgroup float* sums, thread Tile<16 * BANDS, WIDTH>& acc, uint lane) {
#pragma unroll
  for (int i = 0; i < Tile<16 * BANDS, WIDTH>::ELEMENTS; ++i) {
    const int row = Tile<16 * BANDS, WIDTH>::row(i, lane);
    sums[row * (WIDTH + 1) + Tile<16 * BANDS, WIDTH>::column(i, lane)] = acc.get(i);
  }
}
#endif
