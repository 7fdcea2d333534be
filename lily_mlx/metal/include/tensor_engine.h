// The inner engine of tiled products for GPUs with matrix units: Metal 4's tensor operations. The names are those of
// simdgroup_engine.h, and tile.h's tile_multiply_transposed. A kernel gets this header or those two.
//
// A simdgroup's accumulator is a cooperative tensor, which spreads the elements over the lanes in a way that differs
// between generations of GPUs: a lane may have elements that stand nowhere. M or N is a multiple of 16, K of 16.
#ifndef LILY_TENSOR_ENGINE
#define LILY_TENSOR_ENGINE
#if __METAL_VERSION__ >= 400
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#endif

constant constexpr bool ENGINE_SLICES_DEPTH = false;
constant constexpr int NO_ROW = 1 << 28;

// An operand in threadgroup memory. Its extents and strides are columns first.
typedef metal::dextents<int32_t, 2> TensorExtents;
typedef metal::array<int32_t, 2> TensorStrides;
typedef metal::tensor<threadgroup bfloat, TensorExtents, metal::tensor_inline> TensorOperand;

// The operation acc[M, N] += A[M, K] * B[N, K]^T of a simdgroup. It is made twice with equal arguments, here and in
// tile_multiply_transposed, because a cooperative tensor belongs to its type.
#define LILY_TENSOR_PRODUCT(NAME, M, N, K)                                             \
  constexpr auto NAME##_descriptor = mpp::tensor_ops::matmul2d_descriptor(             \
      M, N, K, false, true, false,                                                     \
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);                \
  mpp::tensor_ops::matmul2d<NAME##_descriptor, metal::execution_simdgroup> NAME

#define LILY_ACCUMULATOR(NAME, M, N, K)                                                \
  LILY_TENSOR_PRODUCT(NAME##_product, M, N, K);                                        \
  auto NAME = NAME##_product.template get_destination_cooperative_tensor<TensorOperand, TensorOperand, float>()

template <typename Accumulator>
inline int accumulator_size(thread Accumulator& acc) {
  return int(acc.get_capacity());
}

template <typename Accumulator>
inline void accumulator_clear(thread Accumulator& acc) {
#pragma unroll
  for (int i = 0; i < accumulator_size(acc); ++i) {
    if (acc.is_valid_element(uint16_t(i))) {
      acc[uint16_t(i)] = 0.0f;
    }
  }
}

template <typename Accumulator>
inline float accumulator_get(thread Accumulator& acc, int i) {
  return acc[uint16_t(i)];
}

template <typename Accumulator>
inline void accumulator_set(thread Accumulator& acc, int i, float value) {
  acc[uint16_t(i)] = value;
}

// `lane` is the calling one.
template <typename Accumulator>
inline int accumulator_row(thread Accumulator& acc, int i, uint lane) {
  if (!acc.is_valid_element(uint16_t(i))) {
    return NO_ROW;
  }
  auto index = acc.get_multidimensional_index(uint16_t(i));
  return int(index[1]);
}

template <typename Accumulator>
inline int accumulator_column(thread Accumulator& acc, int i, uint lane) {
  if (!acc.is_valid_element(uint16_t(i))) {
    return 0;
  }
  auto index = acc.get_multidimensional_index(uint16_t(i));
  return int(index[0]);
}

// acc[M, N] += A[M, K] * B[N, K]^T, both in threadgroup memory with `lda` and `ldb` elements per row. Nothing is done
// where no row is below `rows`; the whole simdgroup gives the same `rows`.
template <int M, int N, int K, typename Accumulator>
inline void tile_multiply_transposed(
    thread Accumulator& acc, const threadgroup bfloat* a, int lda, const threadgroup bfloat* b, int ldb, int rows) {
  static_assert(M % 16 == 0 || N % 16 == 0, "a tensor product has a multiple of 16 rows or columns");
  static_assert(K % 16 == 0, "a tensor product has a multiple of 16 columns of K");
  if (rows > 0) {
    LILY_TENSOR_PRODUCT(product, M, N, K);
    // Inline tensors take no pointers to const.
    TensorOperand left((threadgroup bfloat*)a, TensorExtents(K, M), TensorStrides{1, lda});
    TensorOperand right((threadgroup bfloat*)b, TensorExtents(K, N), TensorStrides{1, ldb});
    product.run(left, right, acc);
  }
}

template <int M, int N, int K, typename Accumulator>
inline void tile_multiply_transposed(
    thread Accumulator& acc, const threadgroup bfloat* a, int lda, const threadgroup bfloat* b, int ldb) {
  tile_multiply_transposed<M, N, K>(acc, a, lda, b, ldb, M);
}
#endif
