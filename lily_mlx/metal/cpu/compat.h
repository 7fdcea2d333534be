// Metal for a C++17 compiler. Every kernel of the cpu backend is compiled after this header.
//
// Address spaces vanish. `threadgroup` in a declaration was rewritten to LILY_THREADGROUP before.
#ifndef LILY_CPU_COMPAT
#define LILY_CPU_COMPAT
#define LILY_CPU 1
// Code of this header that the checked mode must not watch.
#ifdef LILY_CHECKED
#define LILY_UNTRACED __attribute__((no_sanitize("thread")))
#else
#define LILY_UNTRACED
#endif
#include "atomics.h"
#include "matrix.h"

namespace lily {

inline char* threadgroup_memory(unsigned& used, size_t bytes, const char* name, Site site) {
  Thread* self = current_thread;
  char* memory = self->simdgroup->threadgroup->memory + used;
  used += unsigned((bytes + 15) / 16 * 16);
  if (__builtin_expect(used > THREADGROUP_BYTES, 0)) {
    lily_threadgroup_memory_exhausted(self, name, bytes, site);
  }
  return memory;
}

inline metal::uint3 vector3(const uint32_t (&v)[3]) { return metal::uint3(v[0], v[1], v[2]); }

// The kernel attributes, by name.
struct Attributes {
  static metal::uint3 thread_position_in_threadgroup() { return vector3(current_thread->position); }
  static metal::uint3 threadgroup_position_in_grid() { return vector3(all().position); }
  static metal::uint3 thread_position_in_grid() {
    return threadgroup_position_in_grid() * vector3(all().launch->threadgroup) + thread_position_in_threadgroup();
  }
  static metal::uint3 threads_per_threadgroup() { return vector3(all().size); }
  static metal::uint3 dispatch_threads_per_threadgroup() { return vector3(all().launch->threadgroup); }
  static metal::uint3 threads_per_grid() { return vector3(all().launch->grid); }
  static metal::uint3 grid_size() { return vector3(all().launch->grid); }
  static metal::uint3 grid_origin() { return metal::uint3(0); }
  static metal::uint3 threadgroups_per_grid() { return vector3(all().launch->threadgroups); }
  static uint thread_index_in_threadgroup() { return current_thread->index; }
  static uint thread_index_in_simdgroup() { return current_thread->lane; }
  static uint simdgroup_index_in_threadgroup() { return current_thread->simdgroup->index; }
  static uint simdgroups_per_threadgroup() { return all().simdgroups; }
  static uint dispatch_simdgroups_per_threadgroup() {
    const uint32_t (&t)[3] = all().launch->threadgroup;
    return (t[0] * t[1] * t[2] + SIMD_WIDTH - 1) / SIMD_WIDTH;
  }
  static uint threads_per_simdgroup() { return SIMD_WIDTH; }
  static uint thread_execution_width() { return SIMD_WIDTH; }
  static uint thread_index_in_quadgroup() { return current_thread->lane % 4; }
  static uint quadgroup_index_in_threadgroup() { return current_thread->index / 4; }
  static uint quadgroups_per_threadgroup() { return (all().threads + 3) / 4; }
  static uint dispatch_quadgroups_per_threadgroup() { return dispatch_simdgroups_per_threadgroup() * 8; }

 private:
  static Threadgroup& all() { return *current_thread->simdgroup->threadgroup; }
};

}  // namespace lily

#define __METAL_VERSION__ 310
#define METAL_FUNC inline __attribute__((__always_inline__))
#define device
#define constant
#define thread
#define threadgroup

// Threadgroup memory is handed out in the order of the declarations, which is the same in every thread.
#define LILY_THREADGROUP(TYPE, NAME, DIMENSIONS)                                                            \
  TYPE(&NAME) DIMENSIONS = *reinterpret_cast<TYPE(*) DIMENSIONS>(lily::threadgroup_memory(                  \
      lily_threadgroup_used, sizeof(TYPE DIMENSIONS), #NAME, {__FILE__, __LINE__, "threadgroup"}))

using namespace metal;
#endif
