// Metal's barriers, atomics, simdgroup operations and simdgroup matrices as declarations.
#pragma once

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}
enum memory_order { memory_order_relaxed };

void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

// ---- atomics ------------------------------------------------------------------------------------------

template <typename T>
struct atomic {
  T lily_value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

template <typename T>
constant constexpr bool lily_is_atomic_v =
    is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, bool> || is_same_v<T, float> || is_same_v<T, ulong>;

#define LILY_ATOMICS(space)                                                                             \
  template <typename T, typename = enable_if_t<lily_is_atomic_v<T>>>                                    \
  T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                                \
  template <typename T, typename = enable_if_t<lily_is_atomic_v<T>>>                                    \
  void atomic_store_explicit(volatile space atomic<T>*, remove_cv_t<T>, memory_order);                  \
  template <typename T, typename = enable_if_t<lily_is_atomic_v<T>>>                                    \
  bool atomic_compare_exchange_weak_explicit(                                                           \
      volatile space atomic<T>*, thread remove_cv_t<T>*, remove_cv_t<T>, memory_order, memory_order);   \
  LILY_ATOMIC(space, exchange)                                                                          \
  LILY_ATOMIC(space, fetch_add)                                                                         \
  LILY_ATOMIC(space, fetch_sub)                                                                         \
  LILY_ATOMIC(space, fetch_and)                                                                         \
  LILY_ATOMIC(space, fetch_or)                                                                          \
  LILY_ATOMIC(space, fetch_xor)                                                                         \
  LILY_ATOMIC(space, fetch_max)                                                                         \
  LILY_ATOMIC(space, fetch_min)
#define LILY_ATOMIC(space, name)                                     \
  template <typename T, typename = enable_if_t<lily_is_atomic_v<T>>> \
  T atomic_##name##_explicit(volatile space atomic<T>*, remove_cv_t<T>, memory_order);
LILY_ATOMICS(device)
LILY_ATOMICS(threadgroup)
#undef LILY_ATOMIC
#undef LILY_ATOMICS

// ---- simdgroups: float, half and integers of up to 32 bits, and vectors of them -------------------------

#define LILY_EACH(M)                                                                                        \
  M(float) M(float2) M(float3) M(float4) M(half) M(half2) M(half3) M(half4) M(char) M(char2) M(char3)       \
  M(char4) M(int8_t) M(uchar) M(uchar2) M(uchar3) M(uchar4) M(short) M(short2) M(short3) M(short4)          \
  M(ushort) M(ushort2) M(ushort3) M(ushort4) M(int) M(int2) M(int3) M(int4) M(uint) M(uint2) M(uint3)       \
  M(uint4)
#define LILY_EACH_INTEGER(M) M(char) M(int8_t) M(uchar) M(short) M(ushort) M(int) M(uint)

#define LILY_PERMUTE(T)                                                                                     \
  T simd_broadcast(T, ushort); T simd_broadcast_first(T); T simd_shuffle(T, ushort);                        \
  T simd_shuffle_up(T, ushort); T simd_shuffle_down(T, ushort); T simd_shuffle_xor(T, ushort);              \
  T simd_shuffle_rotate_up(T, ushort); T simd_shuffle_rotate_down(T, ushort);                               \
  T simd_shuffle_and_fill_up(T, T, ushort); T simd_shuffle_and_fill_up(T, T, ushort, ushort);               \
  T simd_shuffle_and_fill_down(T, T, ushort); T simd_shuffle_and_fill_down(T, T, ushort, ushort);           \
  T quad_broadcast(T, ushort); T quad_shuffle(T, ushort); T quad_shuffle_up(T, ushort);                     \
  T quad_shuffle_down(T, ushort); T quad_shuffle_xor(T, ushort);
#define LILY_REDUCE_SIMD(T)                                                                                 \
  T simd_sum(T); T simd_product(T); T simd_max(T); T simd_min(T); T simd_prefix_inclusive_sum(T);           \
  T simd_prefix_exclusive_sum(T); T simd_prefix_inclusive_product(T); T simd_prefix_exclusive_product(T);   \
  T quad_sum(T); T quad_max(T); T quad_min(T);
#define LILY_BITS(T) T simd_and(T); T simd_or(T); T simd_xor(T);

LILY_EACH(LILY_PERMUTE)
LILY_EACH(LILY_REDUCE_SIMD)
LILY_EACH_INTEGER(LILY_BITS)
#undef LILY_EACH
#undef LILY_EACH_INTEGER
#undef LILY_PERMUTE
#undef LILY_REDUCE_SIMD
#undef LILY_BITS

bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();

// ---- simdgroup matrices ---------------------------------------------------------------------------------

template <typename T, int COLUMNS, int ROWS>
struct simdgroup_matrix {
  static_assert(COLUMNS == 8 && ROWS == 8, "Metal has simdgroup matrices of 8 x 8 only");
  static_assert(
      is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>,
      "Metal has simdgroup matrices of float, half and bfloat only");
  typedef vec<T, 2> storage_type;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {}
  thread storage_type& thread_elements() thread;
  const thread storage_type& thread_elements() const thread;
  storage_type lily_elements;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int C, int R = C>
simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);

#define LILY_MATRIX_MEMORY(space)                                                                              \
  template <typename T, int C, int R>                                                                          \
  void simdgroup_load(                                                                                         \
      thread simdgroup_matrix<T, C, R>&, const space T*, ulong = C, ulong2 = ulong2{}, bool = false);          \
  template <typename T, int C, int R>                                                                          \
  void simdgroup_store(                                                                                        \
      simdgroup_matrix<T, C, R>, space T*, ulong = C, ulong2 = ulong2{}, bool = false);
LILY_MATRIX_MEMORY(device)
LILY_MATRIX_MEMORY(threadgroup)
#undef LILY_MATRIX_MEMORY

template <typename D, typename A, typename B, typename S, int C, int K, int R>
void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, C, R>&,
    const thread simdgroup_matrix<A, K, R>&,
    const thread simdgroup_matrix<B, C, K>&,
    const thread simdgroup_matrix<S, C, R>&);
template <typename D, typename A, typename B, int C, int K, int R>
void simdgroup_multiply(
    thread simdgroup_matrix<D, C, R>&,
    const thread simdgroup_matrix<A, K, R>&,
    const thread simdgroup_matrix<B, C, K>&);

} // namespace metal
