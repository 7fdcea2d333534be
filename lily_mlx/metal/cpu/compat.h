// Metal for a C++17 compiler. Every kernel of the cpu backend is compiled after this header.
//
// Address spaces vanish. `threadgroup` in a declaration was rewritten to LILY_THREADGROUP before.
#ifndef LILY_CPU_COMPAT
#define LILY_CPU_COMPAT
#define LILY_CPU 1
#include "atomics.h"
#include "matrix.h"
#include "tensor.h"

namespace lily {

// How much threadgroup memory a thread's declarations have taken so far.
struct ThreadgroupCursor {
  unsigned bytes = 0, arrays = 0;
};

LILY_UNTRACED inline char* threadgroup_memory(
    ThreadgroupCursor& cursor, size_t bytes, [[maybe_unused]] size_t element, const char* name, Site site) {
  Thread* self = current_thread;
  char* memory = self->simdgroup->threadgroup->memory + cursor.bytes;
  cursor.bytes += unsigned((bytes + 15) / 16 * 16);
  if (__builtin_expect(cursor.bytes > THREADGROUP_BYTES, 0)) {
    lily_threadgroup_memory_exhausted(self, name, bytes, site);
  }
#ifdef LILY_CHECKED
  memory = lily_checked_array(self, cursor.arrays++, bytes, element, name, site);
#endif
  return memory;
}

LILY_UNTRACED inline metal::uint3 vector3(const uint32_t (&v)[3]) { return metal::uint3(v[0], v[1], v[2]); }

// The kernel attributes, by name.
struct Attributes {
  LILY_UNTRACED static metal::uint3 thread_position_in_threadgroup() { return vector3(current_thread->position); }
  LILY_UNTRACED static metal::uint3 threadgroup_position_in_grid() { return vector3(all().position); }
  LILY_UNTRACED static metal::uint3 thread_position_in_grid() {
    return threadgroup_position_in_grid() * vector3(all().launch->threadgroup) + thread_position_in_threadgroup();
  }
  LILY_UNTRACED static metal::uint3 threads_per_threadgroup() { return vector3(all().size); }
  LILY_UNTRACED static metal::uint3 dispatch_threads_per_threadgroup() { return vector3(all().launch->threadgroup); }
  LILY_UNTRACED static metal::uint3 threads_per_grid() { return vector3(all().launch->grid); }
  LILY_UNTRACED static metal::uint3 grid_size() { return vector3(all().launch->grid); }
  LILY_UNTRACED static metal::uint3 grid_origin() { return metal::uint3(0); }
  LILY_UNTRACED static metal::uint3 threadgroups_per_grid() { return vector3(all().launch->threadgroups); }
  LILY_UNTRACED static uint thread_index_in_threadgroup() { return current_thread->index; }
  LILY_UNTRACED static uint thread_index_in_simdgroup() { return current_thread->lane; }
  LILY_UNTRACED static uint simdgroup_index_in_threadgroup() { return current_thread->simdgroup->index; }
  LILY_UNTRACED static uint simdgroups_per_threadgroup() { return all().simdgroups; }
  LILY_UNTRACED static uint dispatch_simdgroups_per_threadgroup() {
    const uint32_t (&t)[3] = all().launch->threadgroup;
    return (t[0] * t[1] * t[2] + SIMD_WIDTH - 1) / SIMD_WIDTH;
  }
  LILY_UNTRACED static uint threads_per_simdgroup() { return SIMD_WIDTH; }
  LILY_UNTRACED static uint thread_execution_width() { return SIMD_WIDTH; }
  LILY_UNTRACED static uint thread_index_in_quadgroup() { return current_thread->lane % 4; }
  LILY_UNTRACED static uint quadgroup_index_in_threadgroup() { return current_thread->index / 4; }
  LILY_UNTRACED static uint quadgroups_per_threadgroup() { return (all().threads + 3) / 4; }
  LILY_UNTRACED static uint dispatch_quadgroups_per_threadgroup() { return dispatch_simdgroups_per_threadgroup() * 8; }

 private:
  LILY_UNTRACED static Threadgroup& all() { return *current_thread->simdgroup->threadgroup; }
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
      lily_threadgroup_cursor, sizeof(TYPE DIMENSIONS), sizeof(TYPE), #NAME, {__FILE__, __LINE__, #NAME}))

using namespace metal;
#endif
