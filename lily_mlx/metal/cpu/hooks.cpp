// What the compiler's thread sanitizer calls before loads and stores, and instead of atomic operations.
#include "checker.h"

#include <cstring>

using namespace lily;

extern "C" {

#define LILY_CALLER __builtin_return_address(0)
#define LILY_HOOKS(N)                                                                                       \
  void __tsan_read##N(void* p) { access(p, N, READ, true, LILY_CALLER); }                                   \
  void __tsan_write##N(void* p) { access(p, N, WRITE, true, LILY_CALLER); }                                 \
  void __tsan_unaligned_read##N(void* p) { access(p, N, READ, false, LILY_CALLER); }                        \
  void __tsan_unaligned_write##N(void* p) { access(p, N, WRITE, false, LILY_CALLER); }                      \
  void __tsan_volatile_read##N(void* p) { access(p, N, READ, true, LILY_CALLER); }                          \
  void __tsan_volatile_write##N(void* p) { access(p, N, WRITE, true, LILY_CALLER); }                        \
  void __tsan_unaligned_volatile_read##N(void* p) { access(p, N, READ, false, LILY_CALLER); }               \
  void __tsan_unaligned_volatile_write##N(void* p) { access(p, N, WRITE, false, LILY_CALLER); }             \
  void __tsan_read##N##_pc(void* p, void* pc) { access(p, N, READ, true, pc); }                             \
  void __tsan_write##N##_pc(void* p, void* pc) { access(p, N, WRITE, true, pc); }
LILY_HOOKS(1)
LILY_HOOKS(2)
LILY_HOOKS(4)
LILY_HOOKS(8)
LILY_HOOKS(16)
void __tsan_read_range(void* p, size_t n) { access(p, n, READ, false, LILY_CALLER); }
void __tsan_write_range(void* p, size_t n) { access(p, n, WRITE, false, LILY_CALLER); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  access(const_cast<void*>(from), n, READ, false, LILY_CALLER);
  access(to, n, WRITE, false, LILY_CALLER);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  access(const_cast<void*>(from), n, READ, false, LILY_CALLER);
  access(to, n, WRITE, false, LILY_CALLER);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  access(to, n, WRITE, false, LILY_CALLER);
  return memset(to, value, n);
}

// The sanitizer turns atomic operations into calls, so they are carried out here.
#define LILY_ATOMICS(BITS, T)                                                                               \
  T __tsan_atomic##BITS##_load(const volatile T* p, int) {                                                  \
    access(const_cast<T*>(p), sizeof(T), ATOMIC_LOAD, true, LILY_CALLER);                                   \
    return __atomic_load_n(p, __ATOMIC_RELAXED);                                                            \
  }                                                                                                         \
  void __tsan_atomic##BITS##_store(volatile T* p, T v, int) {                                               \
    access(const_cast<T*>(p), sizeof(T), ATOMIC_STORE, true, LILY_CALLER);                                  \
    __atomic_store_n(p, v, __ATOMIC_RELAXED);                                                               \
  }                                                                                                         \
  int __tsan_atomic##BITS##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {            \
    access(const_cast<T*>(p), sizeof(T), ATOMIC_UPDATE, true, LILY_CALLER);                                 \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);          \
  }                                                                                                         \
  int __tsan_atomic##BITS##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {              \
    access(const_cast<T*>(p), sizeof(T), ATOMIC_UPDATE, true, LILY_CALLER);                                 \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);          \
  }                                                                                                         \
  T __tsan_atomic##BITS##_compare_exchange_val(volatile T* p, T expected, T v, int, int) {                  \
    access(const_cast<T*>(p), sizeof(T), ATOMIC_UPDATE, true, LILY_CALLER);                                 \
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                \
    return expected;                                                                                        \
  }                                                                                                         \
  T __tsan_atomic##BITS##_exchange(volatile T* p, T v, int) {                                               \
    access(const_cast<T*>(p), sizeof(T), ATOMIC_UPDATE, true, LILY_CALLER);                                 \
    return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);                                                     \
  }                                                                                                         \
  LILY_FETCH(BITS, T, add)                                                                                  \
  LILY_FETCH(BITS, T, sub)                                                                                  \
  LILY_FETCH(BITS, T, and)                                                                                  \
  LILY_FETCH(BITS, T, or)                                                                                   \
  LILY_FETCH(BITS, T, xor)
#define LILY_FETCH(BITS, T, NAME)                                                                           \
  T __tsan_atomic##BITS##_fetch_##NAME(volatile T* p, T v, int) {                                           \
    access(const_cast<T*>(p), sizeof(T), ATOMIC_UPDATE, true, LILY_CALLER);                                 \
    return __atomic_fetch_##NAME(p, v, __ATOMIC_RELAXED);                                                   \
  }
LILY_ATOMICS(8, uint8_t)
LILY_ATOMICS(16, uint16_t)
LILY_ATOMICS(32, uint32_t)
LILY_ATOMICS(64, uint64_t)
void __tsan_atomic_thread_fence(int) {}
void __tsan_atomic_signal_fence(int) {}

}  // extern "C"
