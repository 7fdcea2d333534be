// Metal's atomics. Metal has only relaxed order; so has this.
#ifndef LILY_CPU_ATOMICS
#define LILY_CPU_ATOMICS
#include "simd.h"

namespace metal {

template <typename T>
struct atomic {
  T value;
  atomic() = default;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_ulong = atomic<ulong>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;

template <typename T>
inline T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  T value;
  __atomic_load(&object->value, &value, __ATOMIC_RELAXED);
  return value;
}
template <typename T, typename U>
inline void atomic_store_explicit(volatile atomic<T>* object, U desired, memory_order) {
  T value = T(desired);
  __atomic_store(&object->value, &value, __ATOMIC_RELAXED);
}
template <typename T, typename U>
inline T atomic_exchange_explicit(volatile atomic<T>* object, U desired, memory_order) {
  T value = T(desired), old;
  __atomic_exchange(&object->value, &value, &old, __ATOMIC_RELAXED);
  return old;
}
template <typename T, typename U>
inline bool atomic_compare_exchange_weak_explicit(
    volatile atomic<T>* object, T* expected, U desired, memory_order, memory_order) {
  T value = T(desired);
  return __atomic_compare_exchange(&object->value, expected, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

#define LILY_ATOMIC(NAME, EXPRESSION)                                                                       \
  template <typename T, typename U>                                                                         \
  inline T atomic_fetch_##NAME##_explicit(volatile atomic<T>* object, U operand, memory_order order) {      \
    const T b = T(operand);                                                                                 \
    T a = atomic_load_explicit(object, order);                                                              \
    while (!atomic_compare_exchange_weak_explicit(object, &a, T(EXPRESSION), order, order)) {               \
    }                                                                                                       \
    return a;                                                                                               \
  }
LILY_ATOMIC(add, a + b)
LILY_ATOMIC(sub, a - b)
LILY_ATOMIC(max, metal::max(a, b))
LILY_ATOMIC(min, metal::min(a, b))
LILY_ATOMIC(or, a | b)
LILY_ATOMIC(and, a & b)
LILY_ATOMIC(xor, a ^ b)
#undef LILY_ATOMIC

}  // namespace metal
#endif
