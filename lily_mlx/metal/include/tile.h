// Matrix tiles of one simdgroup, accumulated in float. Needs fragment.h before it.
//
// A Tile<M, N> spreads M x N floats over the 32 lanes. Only row() and column() say where a lane's i-th
// element stands: kernels never assume a layout. A backend that has its own matrix instructions defines
// LILY_NATIVE_TILE and supplies the same struct and functions. An operand whose rows are a multiple of 8 elements apart
// must start at a multiple of 16 bytes.
#if !defined(LILY_TILE) && !defined(LILY_NATIVE_TILE)
#define LILY_TILE

template <int M, int N>
struct Tile {
  static constant constexpr int ELEMENTS = M * N / 32;
  simdgroup_matrix<float, 8, 8> fragments[M / 8][N / 8];

  float get(int i) thread {
    return fragments[i / 2 / (N / 8)][i / 2 % (N / 8)].thread_elements()[i % 2];
  }

  void set(int i, float value) thread {
    fragments[i / 2 / (N / 8)][i / 2 % (N / 8)].thread_elements()[i % 2] = value;
  }

  void clear() thread {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      set(i, 0.0f);
    }
  }

  // Where the i-th element of `lane` stands inside the tile.
  static int row(int i, uint lane) {
    return i / 2 / (N / 8) * 8 + lily_fragment_row(lane);
  }

  static int column(int i, uint lane) {
    return i / 2 % (N / 8) * 8 + lily_fragment_column(lane) + i % 2;
  }
};

// acc[M, N] += A[M, K] * B[N, K]^T, both in threadgroup memory with `lda` and `ldb` elements per row. Fragments of
// which no row is below `rows` are left as they are; the whole simdgroup gives the same `rows`.
template <int M, int N, int K>
inline void tile_multiply_transposed(
    thread Tile<M, N>& acc, const threadgroup bfloat* a, int lda, const threadgroup bfloat* b, int ldb, int rows) {
  for (int k = 0; k < K; k += 8) {
    simdgroup_matrix<bfloat, 8, 8> right[N / 8];
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      simdgroup_load(right[j], b + 8 * j * ldb + k, ldb, ulong2(0), true);
    }
#pragma unroll
    for (int i = 0; i < M / 8; ++i) {
      if (8 * i < rows) {
        simdgroup_matrix<bfloat, 8, 8> left;
        simdgroup_load(left, a + 8 * i * lda + k, lda);
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
          simdgroup_multiply_accumulate(acc.fragments[i][j], left, right[j], acc.fragments[i][j]);
        }
      }
    }
  }
}

template <int M, int N, int K>
inline void tile_multiply_transposed(
    thread Tile<M, N>& acc, const threadgroup bfloat* a, int lda, const threadgroup bfloat* b, int ldb) {
  tile_multiply_transposed<M, N, K>(acc, a, lda, b, ldb, M);
}

// acc[M, N] += A[M, K] * B[K, N].
template <int M, int N, int K>
inline void tile_multiply(
    thread Tile<M, N>& acc, const threadgroup bfloat* a, int lda, const threadgroup bfloat* b, int ldb) {
  for (int k = 0; k < K; k += 8) {
    simdgroup_matrix<bfloat, 8, 8> left[M / 8];
    simdgroup_matrix<bfloat, 8, 8> right[N / 8];
#pragma unroll
    for (int i = 0; i < M / 8; ++i) {
      simdgroup_load(left[i], a + 8 * i * lda + k, lda);
    }
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      simdgroup_load(right[j], b + k * ldb + 8 * j, ldb);
    }
#pragma unroll
    for (int i = 0; i < M / 8; ++i) {
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        simdgroup_multiply_accumulate(acc.fragments[i][j], left[i], right[j], acc.fragments[i][j]);
      }
    }
  }
}

// ---- a left operand in registers ----------------------------------------------------------------------

template <int M, int K>
struct TileOperand {
  simdgroup_matrix<bfloat, 8, 8> fragments[M / 8][K / 8];
};

// The operand [M, K] from threadgroup memory with `lda` elements per row.
template <int M, int K>
inline void load_operand(thread TileOperand<M, K>& operand, const threadgroup bfloat* a, int lda) {
#pragma unroll
  for (int i = 0; i < M / 8; ++i) {
#pragma unroll
    for (int k = 0; k < K / 8; ++k) {
      simdgroup_load(operand.fragments[i][k], a + 8 * i * lda + 8 * k, lda);
    }
  }
}

// The operand of a tile's values, rounded to bfloat16. Fragments of both types hold an element in the same lane.
template <int M, int K>
inline void round_operand(thread TileOperand<M, K>& operand, thread Tile<M, K>& tile) {
#pragma unroll
  for (int i = 0; i < M / 8; ++i) {
#pragma unroll
    for (int k = 0; k < K / 8; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        operand.fragments[i][k].thread_elements()[j] = bfloat(tile.get(2 * (i * (K / 8) + k) + j));
      }
    }
  }
}

// acc[M, N] += A[M, K] * B[N, K]^T.
template <int M, int N, int K>
inline void tile_multiply_transposed(
    thread Tile<M, N>& acc, const thread TileOperand<M, K>& a, const threadgroup bfloat* b, int ldb) {
#pragma unroll
  for (int k = 0; k < K / 8; ++k) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      simdgroup_matrix<bfloat, 8, 8> right;
      simdgroup_load(right, b + 8 * j * ldb + 8 * k, ldb, ulong2(0), true);
#pragma unroll
      for (int i = 0; i < M / 8; ++i) {
        simdgroup_multiply_accumulate(acc.fragments[i][j], a.fragments[i][k], right, acc.fragments[i][j]);
      }
    }
  }
}

// acc[M, N] += A[M, K] * B[K, N].
template <int M, int N, int K>
inline void tile_multiply(
    thread Tile<M, N>& acc, const thread TileOperand<M, K>& a, const threadgroup bfloat* b, int ldb) {
#pragma unroll
  for (int k = 0; k < K / 8; ++k) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      simdgroup_matrix<bfloat, 8, 8> right;
      simdgroup_load(right, b + 8 * k * ldb + 8 * j, ldb);
#pragma unroll
      for (int i = 0; i < M / 8; ++i) {
        simdgroup_multiply_accumulate(acc.fragments[i][j], a.fragments[i][k], right, acc.fragments[i][j]);
      }
    }
  }
}
#endif
