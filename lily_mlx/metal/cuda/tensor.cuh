// Metal 4's tensor operations, as far as metal/include/tensor_engine.h uses them, on tensor cores: the cooperative
// tensor is a Tile. Only kernels that name them get this file.
namespace lily {
namespace metal {

struct tensor_inline {};
template <int SIMDGROUPS>
struct execution_simdgroups {};
using execution_simdgroup = execution_simdgroups<1>;

template <class T, int RANK>
struct dextents {
  static_assert(RANK == 2, "tensors have two dimensions here");
  T columns, rows;
  __forceinline__ dextents(T columns, T rows) : columns(columns), rows(rows) {}
};

template <class T, class EXTENTS, class KIND>
struct tensor;
// Products take whole operands: the extents are those of the product.
template <class T, class INDEX>
struct tensor<T, dextents<INDEX, 2>, tensor_inline> {
  T* data;
  INDEX stride;
  __forceinline__ tensor(T* data, dextents<INDEX, 2>, array<INDEX, 2> strides) : data(data), stride(strides[1]) {}
};

template <class T, int M, int N>
struct cooperative_tensor;
template <int M, int N>
struct cooperative_tensor<float, M, N> {
  Tile<M, N> tile;
  static __forceinline__ constexpr uint16_t get_capacity() { return Tile<M, N>::ELEMENTS; }
  static __forceinline__ constexpr bool is_valid_element(uint16_t) { return true; }
  static __forceinline__ array<int, 2> get_multidimensional_index(uint16_t i) {
    return {Tile<M, N>::column(i, simd_lane()), Tile<M, N>::row(i, simd_lane())};
  }
  __forceinline__ float& operator[](uint16_t i) { return tile.values[i]; }
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr __forceinline__ matmul2d_descriptor(
      int m, int n, int k, bool transpose_left = false, bool transpose_right = false, bool relaxed_precision = false,
      mode matmul_mode = mode::multiply)
      : m(m), n(n), k(k), transpose_left(transpose_left), transpose_right(transpose_right),
        relaxed_precision(relaxed_precision), matmul_mode(matmul_mode) {}
  // C++17 has no template parameters of class type: a number stands for the descriptor.
  constexpr __forceinline__ operator unsigned long long() const {
    return (unsigned long long)m << 48 | (unsigned long long)n << 32 | (unsigned long long)k << 16 |
        unsigned(transpose_left) | unsigned(transpose_right) << 1 | unsigned(matmul_mode) << 2;
  }
};

template <unsigned long long DESCRIPTOR, class SCOPE>
struct matmul2d {
  static constexpr int M = DESCRIPTOR >> 48, N = DESCRIPTOR >> 32 & 0xffff, K = DESCRIPTOR >> 16 & 0xffff;
  static_assert(metal::is_same_v<SCOPE, metal::execution_simdgroup>, "a product is one simdgroup's here");
  static_assert((DESCRIPTOR & 7) == 6, "a product is acc += a * transposed(b) here");

  template <class LEFT, class RIGHT, class T>
  __forceinline__ metal::cooperative_tensor<T, M, N> get_destination_cooperative_tensor() const {
    return {};
  }
  template <class LEFT, class RIGHT>
  __forceinline__ void run(LEFT& left, RIGHT& right, metal::cooperative_tensor<float, M, N>& destination) const {
    tile_multiply_transposed<M, N, K>(destination.tile, left.data, left.stride, right.data, right.stride);
  }
};

}  // namespace tensor_ops
}  // namespace mpp
}  // namespace lily
