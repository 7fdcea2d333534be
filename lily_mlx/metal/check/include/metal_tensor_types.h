// What `#include <metal_tensor>` declares (Metal 4), as far as our kernels use it. In our own words, after the Metal
// Shading Language Specification and MLX's use of it.
#pragma once

namespace metal {

struct tensor_inline {};
template <int SIMDGROUPS>
struct execution_simdgroups {};
typedef execution_simdgroups<1> execution_simdgroup;

// Sizes, columns first.
template <typename T, size_t RANK>
struct dextents {
  static_assert(RANK == 2, "two dimensions are declared here");
  constexpr dextents(T columns, T rows) : lily_columns(columns), lily_rows(rows) {}
  T lily_columns, lily_rows;
};

// T names the memory that the elements are in and is not const.
template <typename T, typename EXTENTS, typename KIND>
struct tensor {
  static_assert(is_same_v<KIND, tensor_inline>, "only tensors made inside a kernel are declared here");
  static_assert(!is_same_v<T, remove_addrspace_t<T>>, "a tensor's element type names its address space");
  tensor(T* data, EXTENTS extents, array<int32_t, 2> strides) {}
};

// Made by an operation alone, and never copied: it is the threads' own memory.
template <typename T, typename LAYOUT>
class cooperative_tensor {
 public:
  cooperative_tensor(const thread cooperative_tensor&) = delete;
  uint16_t get_capacity() const thread;
  bool is_valid_element(uint16_t) const thread;
  array<int, 2> get_multidimensional_index(uint16_t) const thread;
  thread T& operator[](uint16_t) thread;

 private:
  template <unsigned long, typename>
  friend struct lily_matmul2d;
  cooperative_tensor() {}
};

} // namespace metal
