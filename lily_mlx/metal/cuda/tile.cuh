// Tile<M, N> of metal/include/tile.h on tensor cores: m16n8k16 products of bfloat operands that ldmatrix
// brings from threadgroup memory.
//
// The tile is a grid of 8 x 8 fragments, row by row, two floats of each per lane. A product takes a pair of
// fragments one above the other; where M is an odd number of fragments the last pair's lower half is zero.
#define LILY_NATIVE_TILE

namespace lily {

template <int M, int N>
struct Tile {
  static_assert(M % 8 == 0 && N % 8 == 0, "a tile is made of 8 x 8 fragments");
  static constexpr int ELEMENTS = M * N / 32;
  float values[ELEMENTS];

  __forceinline__ float get(int i) const { return values[i]; }
  __forceinline__ void set(int i, float value) { values[i] = value; }
  __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) values[i] = 0.0f;
  }
  static __forceinline__ int row(int i, uint lane) { return i / 2 / (N / 8) * 8 + lily_fragment_row(lane); }
  static __forceinline__ int column(int i, uint lane) {
    return i / 2 % (N / 8) * 8 + lily_fragment_column(lane) + i % 2;
  }
};

__forceinline__ uint shared_address(const void* pointer) { return uint(__cvta_generic_to_shared(pointer)); }

// COUNT 8 x 8 fragments; lane l gives the address of row l % 8 of fragment l / 8.
template <int COUNT, bool TRANSPOSE>
__forceinline__ void load_fragments(uint (&words)[COUNT], const bfloat* row) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4);
  const uint address = shared_address(row);
  if constexpr (COUNT == 4 && TRANSPOSE) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address));
  } else if constexpr (COUNT == 4) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address));
  } else if constexpr (COUNT == 2 && TRANSPOSE) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1]) : "r"(address));
  } else if constexpr (COUNT == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1]) : "r"(address));
  } else if constexpr (TRANSPOSE) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(words[0]) : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(words[0]) : "r"(address));
  }
}

// The same fragments where ldmatrix cannot: rows that do not start at multiples of 16 bytes.
__forceinline__ uint load_pair(const bfloat* first, int step) {
  return uint(first[0].bits) | uint(first[step].bits) << 16;
}

// A block of `source` [rows, columns] as mma operand fragments: ROWS x COLUMNS fragments, where fragment
// (i, j) goes to words[i + ROWS * j]. TRANSPOSE gives each lane the pair below one another.
template <int ROWS, int COLUMNS, bool TRANSPOSE>
__forceinline__ void load_block(uint (&words)[ROWS * COLUMNS], const bfloat* source, int stride, bool aligned) {
  const int lane = int(simd_lane());
  if (aligned) {
    // Lanes past the last fragment give addresses that ldmatrix ignores; keep them inside the block.
    const int fragment = (lane >> 3) % (ROWS * COLUMNS);
    const int i = fragment % ROWS, j = fragment / ROWS;
    load_fragments<ROWS * COLUMNS, TRANSPOSE>(words, source + (8 * i + (lane & 7)) * stride + 8 * j);
  } else {
#pragma unroll
    for (int fragment = 0; fragment < ROWS * COLUMNS; ++fragment) {
      const bfloat* block = source + fragment % ROWS * 8 * stride + fragment / ROWS * 8;
      words[fragment] = TRANSPOSE ? load_pair(block + (lane & 3) * 2 * stride + (lane >> 2), stride)
                                  : load_pair(block + (lane >> 2) * stride + (lane & 3) * 2, 1);
    }
  }
}

// c0, c1: the upper fragment, c2, c3: the lower one. a[0], a[1]: columns 0..7, a[2], a[3]: columns 8..15.
__forceinline__ void multiply_16(float& c0, float& c1, float& c2, float& c3, const uint (&a)[4], uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__forceinline__ void multiply_8(float& c0, float& c1, float& c2, float& c3, const uint (&a)[4], uint b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(a[0]), "r"(a[1]), "r"(b0));
}

// One step of `DEPTH` (16 or 8) columns of A. `a` stands at the step's first column; `b` at its first
// column (B_ROWS: B is [N, K]) or its first row (B is [K, N]).
template <int M, int N, int DEPTH, bool B_ROWS>
__forceinline__ void tile_step(Tile<M, N>& acc, const bfloat* a, int lda, const bfloat* b, int ldb, bool aligned, int rows) {
  constexpr int PAIRS = (M + 15) / 16, COLUMNS = N / 8, KS = DEPTH / 8;
  uint left[PAIRS][4];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    if (16 * i >= rows) continue;
    if (16 * i + 8 < M) {
      uint words[2 * KS];
      load_block<2, KS, false>(words, a + 16 * i * lda, lda, aligned);
#pragma unroll
      for (int j = 0; j < 4; ++j) left[i][j] = j < 2 * KS ? words[j % (2 * KS)] : 0u;
    } else {
      uint words[KS];
      load_block<1, KS, false>(words, a + 16 * i * lda, lda, aligned);
      left[i][0] = words[0];
      left[i][1] = 0u;
      left[i][2] = words[KS - 1];
      left[i][3] = 0u;
    }
  }
#pragma unroll
  for (int j = 0; j < COLUMNS; j += 2) {
    const bool two = j + 1 < COLUMNS;
    uint right[2][2] = {};
    if (two) {
      uint words[2 * KS];
      if (B_ROWS) {
        load_block<2, KS, false>(words, b + 8 * j * ldb, ldb, aligned);
#pragma unroll
        for (int k = 0; k < KS; ++k) right[0][k] = words[2 * k], right[1][k] = words[2 * k + 1];
      } else {
        load_block<KS, 2, true>(words, b + 8 * j, ldb, aligned);
#pragma unroll
        for (int k = 0; k < KS; ++k) right[0][k] = words[k], right[1][k] = words[KS + k];
      }
    } else {
      uint words[KS];
      if (B_ROWS) {
        load_block<1, KS, false>(words, b + 8 * j * ldb, ldb, aligned);
      } else {
        load_block<KS, 1, true>(words, b + 8 * j, ldb, aligned);
      }
#pragma unroll
      for (int k = 0; k < KS; ++k) right[0][k] = words[k];
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (j + n >= COLUMNS) continue;
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        if (16 * i >= rows) continue;
        float* upper = acc.values + 2 * (2 * i * COLUMNS + j + n);
        float unused[2] = {0.0f, 0.0f};
        float* lower = 16 * i + 8 < M ? upper + 2 * COLUMNS : unused;
        if (DEPTH == 16) {
          multiply_16(upper[0], upper[1], lower[0], lower[1], left[i], right[n][0], right[n][1]);
        } else {
          multiply_8(upper[0], upper[1], lower[0], lower[1], left[i], right[n][0]);
        }
      }
    }
  }
}

template <int M, int N, int K, bool B_ROWS>
__forceinline__ void tile_product(Tile<M, N>& acc, const bfloat* a, int lda, const bfloat* b, int ldb, int rows) {
  static_assert(K % 8 == 0, "a product has a multiple of 8 columns");
  const bool aligned = ((lda | ldb) & 7) == 0;  // tile.h's rule; the compiler decides it, strides are constants
#pragma unroll
  for (int k = 0; k + 16 <= K; k += 16) {
    tile_step<M, N, 16, B_ROWS>(acc, a + k, lda, b + (B_ROWS ? k : k * ldb), ldb, aligned, rows);
  }
  if constexpr (K % 16 != 0) {
    constexpr int k = K - 8;
    tile_step<M, N, 8, B_ROWS>(acc, a + k, lda, b + (B_ROWS ? k : k * ldb), ldb, aligned, rows);
  }
}

// Rows from `rows` on are left as they are, where a whole pair of fragments of them is.
template <int M, int N, int K>
__forceinline__ void tile_multiply_transposed(
    Tile<M, N>& acc, const bfloat* a, int lda, const bfloat* b, int ldb, int rows = M) {
  tile_product<M, N, K, true>(acc, a, lda, b, ldb, rows);
}

template <int M, int N, int K>
__forceinline__ void tile_multiply(Tile<M, N>& acc, const bfloat* a, int lda, const bfloat* b, int ldb) {
  tile_product<M, N, K, false>(acc, a, lda, b, ldb, M);
}

// A left operand in registers: words[i][k] is the mma operand of the i-th pair of fragments and 16 columns.
template <int M, int K>
struct TileOperand {
  static_assert(K % 16 == 0, "an operand has a multiple of 16 columns");
  uint words[(M + 15) / 16][K / 16][4];
};

template <int M, int K>
__forceinline__ void load_operand(TileOperand<M, K>& operand, const bfloat* a, int lda) {
  const bool aligned = (lda & 7) == 0;
#pragma unroll
  for (int i = 0; i < (M + 15) / 16; ++i) {
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
      if (16 * i + 8 < M) {
        load_block<2, 2, false>(operand.words[i][k], a + 16 * i * lda + 16 * k, lda, aligned);
      } else {
        uint words[2];
        load_block<1, 2, false>(words, a + 16 * i * lda + 16 * k, lda, aligned);
        operand.words[i][k][0] = words[0];
        operand.words[i][k][1] = 0u;
        operand.words[i][k][2] = words[1];
        operand.words[i][k][3] = 0u;
      }
    }
  }
}

// A result fragment and an operand fragment hold the same elements in the same lanes.
template <int M, int K>
__forceinline__ void round_operand(TileOperand<M, K>& operand, const Tile<M, K>& tile) {
#pragma unroll
  for (int i = 0; i < (M + 15) / 16; ++i) {
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = 2 * i + j % 2;  // of fragments
        const int element = 2 * (row * (K / 8) + 2 * k + j / 2);
        operand.words[i][k][j] = 8 * row < M
            ? uint(bfloat(tile.values[8 * row < M ? element : 0]).bits) |
                uint(bfloat(tile.values[8 * row < M ? element + 1 : 0]).bits) << 16
            : 0u;
      }
    }
  }
}

template <bool B_ROWS, int M, int N, int K>
__forceinline__ void operand_product(Tile<M, N>& acc, const TileOperand<M, K>& a, const bfloat* b, int ldb) {
  constexpr int COLUMNS = N / 8;
  const bool aligned = (ldb & 7) == 0;
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {
#pragma unroll
    for (int j = 0; j < COLUMNS; j += 2) {
      uint words[4], right[2][2];
      if (j + 1 == COLUMNS) {
        if (B_ROWS) {
          load_block<1, 2, false>(right[0], b + 8 * j * ldb + 16 * k, ldb, aligned);
        } else {
          load_block<2, 1, true>(right[0], b + 16 * k * ldb + 8 * j, ldb, aligned);
        }
      } else if (B_ROWS) {
        load_block<2, 2, false>(words, b + 8 * j * ldb + 16 * k, ldb, aligned);
        right[0][0] = words[0], right[0][1] = words[2], right[1][0] = words[1], right[1][1] = words[3];
      } else {
        load_block<2, 2, true>(words, b + 16 * k * ldb + 8 * j, ldb, aligned);
        right[0][0] = words[0], right[0][1] = words[1], right[1][0] = words[2], right[1][1] = words[3];
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (j + n >= COLUMNS) continue;
#pragma unroll
        for (int i = 0; i < (M + 15) / 16; ++i) {
          float* upper = acc.values + 2 * (2 * i * COLUMNS + j + n);
          float unused[2] = {0.0f, 0.0f};
          float* lower = 16 * i + 8 < M ? upper + 2 * COLUMNS : unused;
          multiply_16(upper[0], upper[1], lower[0], lower[1], a.words[i][k], right[n][0], right[n][1]);
        }
      }
    }
  }
}

template <int M, int N, int K>
__forceinline__ void tile_multiply_transposed(
    Tile<M, N>& acc, const TileOperand<M, K>& a, const bfloat* b, int ldb) {
  operand_product<true>(acc, a, b, ldb);
}
template <int M, int N, int K>
__forceinline__ void tile_multiply(Tile<M, N>& acc, const TileOperand<M, K>& a, const bfloat* b, int ldb) {
  operand_product<false>(acc, a, b, ldb);
}

// metal/include/copy.h with cp.async.
#define LILY_NATIVE_COPY
__forceinline__ void begin_copy(uint4* to, const uint4* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__forceinline__ void finish_groups() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

}  // namespace lily
