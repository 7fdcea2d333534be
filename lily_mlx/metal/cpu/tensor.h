// Metal 4's tensor operations, as far as metal/include/tensor_engine.h uses them: inline tensors of two dimensions in
// threadgroup memory, and a simdgroup's product with a cooperative tensor as its destination.
#ifndef LILY_CPU_TENSOR
#define LILY_CPU_TENSOR
#include "matrix.h"

namespace metal {

struct tensor_inline {};
template <int SIMDGROUPS> struct execution_simdgroups {};
using execution_simdgroup = execution_simdgroups<1>;

// Sizes that the program knows when it runs, columns first.
template <typename T, int RANK>
struct dextents {
  static_assert(RANK == 2, "tensors have two dimensions here");
  T sizes[2];
  LILY_UNTRACED dextents(T columns, T rows) : sizes{columns, rows} {}
};

template <typename T, typename EXTENTS, typename KIND>
struct tensor;
template <typename T, typename INDEX>
struct tensor<T, dextents<INDEX, 2>, tensor_inline> {
  using element_type = T;
  T* data;
  INDEX sizes[2], strides[2];
  LILY_UNTRACED tensor(T* data, dextents<INDEX, 2> extents, array<INDEX, 2> strides)
      : data(data), sizes{extents.sizes[0], extents.sizes[1]}, strides{strides.elements[0], strides.elements[1]} {}
};

// A lane's part of an M x N matrix: column by column, from the last lane to the first, after one element that stands
// nowhere. Neither that nor anything else of it is like simdgroup_matrix: a kernel that assumes a layout fails here.
template <typename T, int M, int N>
struct cooperative_tensor {
  static constexpr int ELEMENTS = (M * N + 31) / 32;
  T elements[1 + ELEMENTS];
  LILY_UNTRACED cooperative_tensor() {
    for (T& element : elements) element = __builtin_nanf("");
  }
  cooperative_tensor(const cooperative_tensor&) = delete;
  cooperative_tensor& operator=(const cooperative_tensor&) = delete;

  static uint16_t get_capacity() { return 1 + ELEMENTS; }
  LILY_UNTRACED static int place(uint16_t i) { return (i - 1) * 32 + 31 - int(lily::current_thread->lane); }
  LILY_UNTRACED static bool is_valid_element(uint16_t i) { return i > 0 && i <= ELEMENTS && place(i) < M * N; }
  LILY_UNTRACED static array<int, 2> get_multidimensional_index(uint16_t i) {
    return is_valid_element(i) ? array<int, 2>{place(i) / M, place(i) % M} : array<int, 2>{0, 0};
  }
  T& operator[](uint16_t i) { return elements[i]; }
};

}  // namespace metal

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(
      int m, int n, int k, bool transpose_left = false, bool transpose_right = false, bool relaxed_precision = false,
      mode matmul_mode = mode::multiply)
      : m(m), n(n), k(k), transpose_left(transpose_left), transpose_right(transpose_right),
        relaxed_precision(relaxed_precision), matmul_mode(matmul_mode) {}
  // C++17 has no template parameters of class type: a number stands for the descriptor.
  constexpr operator unsigned long long() const {
    return (unsigned long long)m << 48 | (unsigned long long)n << 32 | (unsigned long long)k << 16 |
           unsigned(transpose_left) | unsigned(transpose_right) << 1 | unsigned(matmul_mode) << 2;
  }
};

template <unsigned long long DESCRIPTOR, typename SCOPE>
struct matmul2d {
  static constexpr int M = DESCRIPTOR >> 48, N = DESCRIPTOR >> 32 & 0xffff, K = DESCRIPTOR >> 16 & 0xffff;
  static_assert(__is_same(SCOPE, metal::execution_simdgroup), "a product is one simdgroup's here");
  static_assert((DESCRIPTOR & 7) == 6, "a product is acc += a * transposed(b) here");
  static_assert(M % 16 == 0 || N % 16 == 0, "matmul2d wants a multiple of 16 rows or columns");

  template <typename LEFT, typename RIGHT, typename T>
  metal::cooperative_tensor<T, M, N> get_destination_cooperative_tensor() const { return {}; }

  // In checked mode each lane reads its share of both operands under the checks, and all lanes must come.
  template <typename LEFT, typename RIGHT, typename T>
  inline __attribute__((always_inline)) void run(
      LEFT& left, RIGHT& right, metal::cooperative_tensor<T, M, N>& destination, LILY_SITE("matmul2d")) const {
#ifdef LILY_CHECKED
    touch(left, M);
    touch(right, N);
    lily::meet_simdgroup(lily::current_thread, site);
#else
    (void)site;
#endif
    multiply(left, right, destination);
  }

 private:
  template <typename LEFT, typename RIGHT, typename T>
  LILY_UNTRACED static void multiply(LEFT& left, RIGHT& right, metal::cooperative_tensor<T, M, N>& destination) {
    const int depth = smaller(K, smaller(left.sizes[0], right.sizes[0]));
    for (uint16_t i = 0; i < destination.get_capacity(); ++i) {
      const auto index = destination.get_multidimensional_index(i);
      const int column = index.elements[0], row = index.elements[1];
      // What is beyond an operand's extents counts as zero.
      if (!destination.is_valid_element(i) || row >= left.sizes[1] || column >= right.sizes[1]) {
        continue;
      }
      const uint16_t* a = words(left) + row * left.strides[1];
      const uint16_t* b = words(right) + column * right.strides[1];
      float sum = destination.elements[i];
      for (int k = 0; k < depth; ++k) {
        sum += widen(a[k * left.strides[0]]) * widen(b[k * right.strides[0]]);
      }
      destination.elements[i] = sum;
    }
  }
  template <typename OPERAND>
  LILY_UNTRACED static const uint16_t* words(const OPERAND& operand) {
    static_assert(__is_same(typename OPERAND::element_type, metal::bfloat), "operands are bfloat here");
    return reinterpret_cast<const uint16_t*>(operand.data);
  }
  LILY_UNTRACED static int smaller(int a, int b) { return a < b ? a : b; }
  LILY_UNTRACED static float widen(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    __builtin_memcpy(&value, &word, 4);
    return value;
  }
  template <typename OPERAND>
  static inline __attribute__((always_inline)) void touch(const OPERAND& operand, int rows) {
    const int columns = smaller(K, operand.sizes[0]);
    for (int i = int(lily::this_lane()); i < columns * smaller(rows, operand.sizes[1]); i += 32) {
      const uint16_t word = words(operand)[i / columns * operand.strides[1] + i % columns * operand.strides[0]];
      asm volatile("" : : "r"(word));
    }
  }
};

}  // namespace mpp::tensor_ops
#endif
