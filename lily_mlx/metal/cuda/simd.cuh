// Simdgroups (warps of 32), barriers and atomics. LILY_THREADS is the number of threads of a threadgroup,
// LILY_THREAD this thread's index in it.
#define LILY_THREADGROUP(TYPE, NAME, ...) __shared__ __align__(16) TYPE NAME __VA_ARGS__

namespace lily {
namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
__forceinline__ constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

__forceinline__ void threadgroup_barrier(mem_flags) { __syncthreads(); }

__forceinline__ uint simd_lane() {
  uint lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// The lanes that exist: all of them, except in the last simdgroup of a threadgroup of odd size.
constexpr bool SIMDGROUPS_FULL = LILY_THREADS % 32 == 0;
__forceinline__ uint simd_mask() {
  if (SIMDGROUPS_FULL) return 0xffffffffu;
  return LILY_THREAD / 32 == LILY_THREADS / 32 ? (1u << (LILY_THREADS % 32)) - 1u : 0xffffffffu;
}
__forceinline__ bool simd_has(uint lane) { return SIMDGROUPS_FULL || (simd_mask() >> (lane & 31) & 1); }

__forceinline__ void simdgroup_barrier(mem_flags) { __syncwarp(simd_mask()); }

// ---- moves: any type is moved as 32-bit words -----------------------------------------------------------

template <int WORDS>
struct alignas(4) Words {
  uint word[WORDS];
};

template <class T, class Move>
__forceinline__ T simd_move(T value, Move move) {
  if constexpr (sizeof(T) == 1) {
    return as_type<T>(uchar(move(uint(as_type<uchar>(value)))));
  } else if constexpr (sizeof(T) == 2) {
    return as_type<T>(ushort(move(uint(as_type<ushort>(value)))));
  } else {
    auto words = as_type<Words<sizeof(T) / 4>>(value);
    _Pragma("unroll") for (int i = 0; i < int(sizeof(T) / 4); ++i) words.word[i] = move(words.word[i]);
    return as_type<T>(words);
  }
}

#define LILY_SIMD_MOVE(NAME, INTRINSIC, TYPE)                                                    \
  struct Move_##NAME {                                                                           \
    TYPE argument;                                                                               \
    __forceinline__ uint operator()(uint word) const { return INTRINSIC(simd_mask(), word, argument); } \
  };                                                                                             \
  template <class T>                                                                             \
  __forceinline__ T NAME(T value, TYPE argument) {                                               \
    return simd_move(value, Move_##NAME{argument});                                              \
  }
LILY_SIMD_MOVE(simd_shuffle, __shfl_sync, ushort)
LILY_SIMD_MOVE(simd_broadcast, __shfl_sync, ushort)
LILY_SIMD_MOVE(simd_shuffle_xor, __shfl_xor_sync, ushort)
LILY_SIMD_MOVE(simd_shuffle_up, __shfl_up_sync, ushort)
LILY_SIMD_MOVE(simd_shuffle_down, __shfl_down_sync, ushort)
#undef LILY_SIMD_MOVE

template <class T>
__forceinline__ T simd_broadcast_first(T value) { return simd_broadcast(value, 0); }
template <class T>
__forceinline__ T simd_shuffle_rotate_up(T value, ushort delta) {
  return simd_shuffle(value, ushort((simd_lane() + 32 - delta) & 31));
}
template <class T>
__forceinline__ T simd_shuffle_rotate_down(T value, ushort delta) {
  return simd_shuffle(value, ushort((simd_lane() + delta) & 31));
}
template <class T>
__forceinline__ T simd_shuffle_and_fill_up(T value, T fill, ushort delta) {
  T own = simd_shuffle_up(value, delta), other = simd_shuffle(fill, ushort((simd_lane() + 32 - delta) & 31));
  return simd_lane() < delta ? other : own;
}
template <class T>
__forceinline__ T simd_shuffle_and_fill_down(T value, T fill, ushort delta) {
  T own = simd_shuffle_down(value, delta), other = simd_shuffle(fill, ushort((simd_lane() + delta) & 31));
  return simd_lane() + delta >= 32 ? other : own;
}
template <class T>
__forceinline__ T quad_shuffle_xor(T value, ushort mask) { return simd_shuffle_xor(value, mask); }
template <class T>
__forceinline__ T quad_broadcast(T value, ushort lane) {
  return simd_shuffle(value, ushort((simd_lane() & ~3u) + lane));
}
__forceinline__ bool simd_is_first() { return simd_lane() == 0; }
__forceinline__ bool simd_all(bool value) { return __all_sync(simd_mask(), value); }
__forceinline__ bool simd_any(bool value) { return __any_sync(simd_mask(), value); }

// ---- reductions: every lane gets the result, and the same one -------------------------------------------

// Kernels may have functions of these names.
namespace operation {
struct Add {
  template <class T>
  __forceinline__ T operator()(T a, T b) const { return a + b; }
};
struct Multiply {
  template <class T>
  __forceinline__ T operator()(T a, T b) const { return a * b; }
};
struct Maximum {
  template <class T>
  __forceinline__ T operator()(T a, T b) const { return metal::max(a, b); }
};
struct Minimum {
  template <class T>
  __forceinline__ T operator()(T a, T b) const { return metal::min(a, b); }
};
struct And {
  template <class T>
  __forceinline__ T operator()(T a, T b) const { return a & b; }
};
struct Or {
  template <class T>
  __forceinline__ T operator()(T a, T b) const { return a | b; }
};
struct Xor {
  template <class T>
  __forceinline__ T operator()(T a, T b) const { return a ^ b; }
};
}  // namespace operation

template <class T, class Operation>
__forceinline__ T simd_reduce(T value, Operation operation, int lanes = 32) {
  _Pragma("unroll") for (int offset = 16; offset > 0; offset /= 2) {
    if (offset >= lanes) continue;
    T other = simd_shuffle_xor(value, ushort(offset));
    if (simd_has(simd_lane() ^ offset)) value = operation(value, other);
  }
  return SIMDGROUPS_FULL ? value : simd_broadcast(value, ushort(simd_lane() & ~uint(lanes - 1)));
}

#define LILY_SIMD_REDUCE(NAME, OPERATION)                                                             \
  template <class T>                                                                                  \
  __forceinline__ T simd_##NAME(T value) { return simd_reduce(value, operation::OPERATION()); }       \
  template <class T>                                                                                  \
  __forceinline__ T quad_##NAME(T value) { return simd_reduce(value, operation::OPERATION(), 4); }
LILY_SIMD_REDUCE(sum, Add)
LILY_SIMD_REDUCE(product, Multiply)
LILY_SIMD_REDUCE(max, Maximum)
LILY_SIMD_REDUCE(min, Minimum)
LILY_SIMD_REDUCE(and, And)
LILY_SIMD_REDUCE(or, Or)
LILY_SIMD_REDUCE(xor, Xor)
#undef LILY_SIMD_REDUCE

// Integers have one instruction for the whole reduction.
__forceinline__ uint simd_sum(uint value) { return __reduce_add_sync(simd_mask(), value); }
__forceinline__ int simd_sum(int value) { return __reduce_add_sync(simd_mask(), value); }
__forceinline__ uint simd_max(uint value) { return __reduce_max_sync(simd_mask(), value); }
__forceinline__ int simd_max(int value) { return __reduce_max_sync(simd_mask(), value); }
__forceinline__ uint simd_min(uint value) { return __reduce_min_sync(simd_mask(), value); }
__forceinline__ int simd_min(int value) { return __reduce_min_sync(simd_mask(), value); }
__forceinline__ uint simd_and(uint value) { return __reduce_and_sync(simd_mask(), value); }
__forceinline__ uint simd_or(uint value) { return __reduce_or_sync(simd_mask(), value); }
__forceinline__ uint simd_xor(uint value) { return __reduce_xor_sync(simd_mask(), value); }

template <class T, class Operation>
__forceinline__ T simd_scan(T value, Operation operation) {
  _Pragma("unroll") for (int offset = 1; offset < 32; offset *= 2) {
    T other = simd_shuffle_up(value, ushort(offset));
    if (simd_lane() >= uint(offset)) value = operation(other, value);
  }
  return value;
}
template <class T>
__forceinline__ T simd_prefix_inclusive_sum(T value) { return simd_scan(value, operation::Add()); }
template <class T>
__forceinline__ T simd_prefix_inclusive_product(T value) { return simd_scan(value, operation::Multiply()); }
template <class T>
__forceinline__ T simd_prefix_exclusive_sum(T value) {
  T before = simd_shuffle_up(simd_scan(value, operation::Add()), 1);
  return simd_lane() == 0 ? T(0) : before;
}
template <class T>
__forceinline__ T simd_prefix_exclusive_product(T value) {
  T before = simd_shuffle_up(simd_scan(value, operation::Multiply()), 1);
  return simd_lane() == 0 ? T(1) : before;
}

// ---- atomics --------------------------------------------------------------------------------------------

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;

#define LILY_ATOMIC(NAME, INTRINSIC)                                                                    \
  template <class T>                                                                                    \
  __forceinline__ T atomic_##NAME##_explicit(atomic<T>* object, identity_t<T> operand, memory_order) {  \
    return INTRINSIC(&object->value, operand);                                                          \
  }
LILY_ATOMIC(fetch_add, ::atomicAdd)
LILY_ATOMIC(fetch_min, ::atomicMin)
LILY_ATOMIC(fetch_max, ::atomicMax)
LILY_ATOMIC(fetch_and, ::atomicAnd)
LILY_ATOMIC(fetch_or, ::atomicOr)
LILY_ATOMIC(fetch_xor, ::atomicXor)
LILY_ATOMIC(exchange, ::atomicExch)
#undef LILY_ATOMIC
template <class T>
__forceinline__ T atomic_fetch_sub_explicit(atomic<T>* object, identity_t<T> operand, memory_order) {
  return ::atomicAdd(&object->value, T(-operand));
}
template <class T>
__forceinline__ T atomic_load_explicit(const atomic<T>* object, memory_order) {
  return *(const volatile T*)&object->value;
}
template <class T>
__forceinline__ void atomic_store_explicit(atomic<T>* object, identity_t<T> desired, memory_order) {
  *(volatile T*)&object->value = desired;
}
template <class T>
__forceinline__ bool atomic_compare_exchange_weak_explicit(
    atomic<T>* object, T* expected, identity_t<T> desired, memory_order, memory_order) {
  const T found = ::atomicCAS(&object->value, *expected, desired);
  const bool exchanged = found == *expected;
  *expected = found;
  return exchanged;
}

}  // namespace metal
}  // namespace lily
