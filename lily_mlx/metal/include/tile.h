// Matrix tiles of one simdgroup, accumulated in float. Needs fragment.h before it.
//
// A Tile<M, N> spreads M x N floats over the 32 lanes. Only row() and column() say where a lane's i-th
// element stands: kernels never assume a layout. A backend that has its own matrix instructions defines
// LILY_NATIVE_TILE and supplies the same struct and functions.
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

// acc[M, N] += A[M, K] * B[N, K]^T, both in threadgroup memory with `lda` and `ldb` elements per row.
template <int M, int N, int K>
inline void tile_multiply_transposed(
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
      simdgroup_load(right[j], b + 8 * j * ldb + k, ldb, ulong2(0), true);
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
#endif
