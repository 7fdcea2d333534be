// What `#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>` declares, as far as our kernels use it. In
// our own words, after MLX's use of it and the Metal Performance Primitives Programming Guide.
#pragma once
#include "metal_tensor_types.h"

namespace metal {

template <typename T>
constant constexpr bool lily_is_bfloat_tensor_v = false;
template <typename EXTENTS>
constant constexpr bool lily_is_bfloat_tensor_v<tensor<threadgroup bfloat, EXTENTS, tensor_inline>> = true;
template <typename EXTENTS>
constant constexpr bool lily_is_bfloat_tensor_v<tensor<device bfloat, EXTENTS, tensor_inline>> = true;

template <unsigned long DESCRIPTOR, typename SCOPE>
struct lily_matmul2d {
  static constant constexpr int M = DESCRIPTOR >> 48;
  static constant constexpr int N = DESCRIPTOR >> 32 & 0xffff;
  static constant constexpr int K = DESCRIPTOR >> 16 & 0xffff;
  static_assert(M % 16 == 0 || N % 16 == 0, "matmul2d wants a multiple of 16 rows or columns");
  static_assert(K % 16 == 0, "matmul2d wants a multiple of 16 of K here");
  static_assert(is_same_v<SCOPE, execution_simdgroup>, "a product is one simdgroup's here");

  // A destination belongs to the operation and its operands.
  template <typename LEFT, typename RIGHT>
  struct lily_destination {};

  template <typename LEFT, typename RIGHT, typename T>
  cooperative_tensor<T, lily_destination<LEFT, RIGHT>> get_destination_cooperative_tensor() const thread {
    static_assert(is_same_v<T, float>, "products of bfloat are added in float here");
    return {};
  }

  template <typename LEFT, typename RIGHT, typename T>
  void run(
      thread LEFT&, thread RIGHT&, thread cooperative_tensor<T, lily_destination<LEFT, RIGHT>>&) const thread {
    static_assert(lily_is_bfloat_tensor_v<LEFT> && lily_is_bfloat_tensor_v<RIGHT>, "operands are bfloat tensors here");
  }
};

} // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  constexpr matmul2d_descriptor(
      int m, int n, int k, bool transpose_left = false, bool transpose_right = false, bool relaxed_precision = false,
      mode matmul_mode = mode::multiply)
      : lily_value(
            (unsigned long)m << 48 | (unsigned long)n << 32 | (unsigned long)k << 16 | (unsigned long)transpose_left |
            (unsigned long)transpose_right << 1 | (unsigned long)relaxed_precision << 2 |
            (unsigned long)matmul_mode << 3) {}
  // Here there are no template parameters of class type: a number stands for the descriptor.
  constexpr operator unsigned long() const { return lily_value; }
  unsigned long lily_value;
};

template <unsigned long DESCRIPTOR, typename SCOPE>
using matmul2d = metal::lily_matmul2d<DESCRIPTOR, SCOPE>;

} // namespace tensor_ops
} // namespace mpp
