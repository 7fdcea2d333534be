// Threads of a threadgroup as fibres: what a compiled kernel and the runtime share.
//
// One operating system thread (a worker) runs one threadgroup at a time. Each Metal thread of it is a
// fibre with its own stack. A fibre runs until it reaches a barrier or a simd operation, then hands over to
// the next one of its simdgroup; the last one to arrive releases the others and runs on. So every collective
// costs each thread one switch of stacks and no locks.
#ifndef LILY_CPU_FIBERS
#define LILY_CPU_FIBERS
#include <stddef.h>
#include <stdint.h>

namespace lily {

constexpr unsigned SIMD_WIDTH = 32;
constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned THREADGROUP_BYTES = 32768;
constexpr unsigned MAX_VALUE_BYTES = 16;  // largest type of a simd operation: float4

// A place in a kernel's text.
struct Site {
  const char* file = nullptr;
  int line = 0;
  const char* operation = nullptr;
};

struct Simdgroup;
struct Threadgroup;

// One Metal thread.
struct Thread {
  void* stack_pointer;  // while suspended
  char* stack;          // lowest address; null before the thread starts and after it ends
  Thread* next;         // ring of the live threads of the simdgroup
  Thread* previous;
  Simdgroup* simdgroup;
  uint32_t lane;        // thread_index_in_simdgroup
  uint32_t index;       // thread_index_in_threadgroup
  uint32_t position[3]; // thread_position_in_threadgroup
  uint32_t epoch;       // barriers passed, for the checked mode
  enum State : uint32_t { UNSTARTED, RUNNING, SIMD, BARRIER, ENDED } state;
  uint32_t awaited;     // the generation that this thread waits for the end of
  Site site;            // where it waits
};

// Up to 32 threads whose simd operations go together.
struct Simdgroup {
  Thread* first;           // some live thread
  Threadgroup* threadgroup;
  uint32_t index;
  uint32_t mask;           // live lanes
  uint32_t live;
  uint32_t arrived;        // at the current simd operation
  uint32_t generation;     // simd operations completed
  uint32_t at_barrier;     // waiting at the threadgroup barrier
  uint32_t participants[2];  // lanes that took part in the operation of that parity
  uint32_t reduced[2];     // 1 + the generation whose reduction stands in `result` of that parity
  // Two sets of values: threads that are already at the next operation must not disturb late readers.
  alignas(64) unsigned char values[2][SIMD_WIDTH * MAX_VALUE_BYTES];
  alignas(64) unsigned char extra[2][SIMD_WIDTH * MAX_VALUE_BYTES];
  alignas(64) unsigned char result[2][SIMD_WIDTH * MAX_VALUE_BYTES];
};

// A launch as the kernel sees it.
struct Launch {
  void (*entry)(void* const* arguments);
  void* const* arguments;
  uint32_t grid[3];         // threads
  uint32_t threadgroup[3];  // threads
  uint32_t threadgroups[3];
  uint32_t checked;
};

struct Threadgroup {
  const Launch* launch;
  uint32_t position[3];  // threadgroup_position_in_grid
  uint32_t size[3];      // threads_per_threadgroup; smaller at the edge of an uneven grid
  uint32_t threads;
  uint32_t simdgroups;
  uint32_t live;
  uint32_t arrived;     // at the threadgroup barrier
  uint32_t generation;  // barriers completed
  char* memory;         // threadgroup memory
  Thread* thread;       // array
  Simdgroup* simdgroup; // array
};

#if defined(__APPLE__)
#define LILY_TLS_MODEL
#else
#define LILY_TLS_MODEL __attribute__((tls_model("initial-exec")))
#endif
extern __thread Thread* current_thread LILY_TLS_MODEL;

extern "C" {
// Saves the running fibre's stack pointer in *save and goes on where `target` was saved.
void lily_switch(void** save, void* target);
// Runs a thread for the first time, on a new stack; returns when the running thread is resumed.
void lily_start(Thread* self, Thread* next);
// Hands over to any thread that can run; reports an error if none can. Returns when resumed.
void lily_reschedule(Thread* self);
// Hands over to a simdgroup that is not yet at the barrier.
void lily_leave_simdgroup(Thread* self);
// Reports a declaration that needs more threadgroup memory than there is.
[[noreturn]] void lily_threadgroup_memory_exhausted(Thread* self, const char* name, size_t bytes, Site site);
// Reports that two threads of a simdgroup are in different simd operations.
[[noreturn]] void lily_mismatch(Thread* self, Thread* other);
// Reports that a simd operation reads a lane that did not take part.
[[noreturn]] void lily_absent_lane(Thread* self, uint32_t lane);
// d = c + a b for 8x8 matrices of float, row by row.
void lily_multiply_8x8(float* d, const float* a, const float* b, const float* c);
}

inline void switch_to(Thread* self, Thread* next) {
  if (__builtin_expect(next->state == Thread::UNSTARTED, 0)) {
    lily_start(self, next);
  } else {
    current_thread = next;
    lily_switch(&self->stack_pointer, next->stack_pointer);
  }
}

inline void release_simdgroup(Simdgroup& group) {
  group.participants[group.generation & 1] = group.mask;
  group.arrived = 0;
  ++group.generation;
}

inline void release_threadgroup(Threadgroup& all) {
  all.arrived = 0;
  ++all.generation;
  for (unsigned i = 0; i < all.simdgroups; ++i) {
    all.simdgroup[i].at_barrier = 0;
  }
}

inline bool same_site(const Site& a, const Site& b) {
  return a.line == b.line && a.file == b.file && a.operation == b.operation;
}

// Waits until all live threads of the simdgroup have called. Values written to values[parity] before the
// call are visible to all of them afterwards; returns that parity.
inline unsigned meet_simdgroup(Thread* self, Site site) {
  Simdgroup& group = *self->simdgroup;
  const uint32_t generation = group.generation;
  self->site = site;
#ifdef LILY_CHECKED
  if (group.arrived != 0 && !same_site(self->previous->site, site) &&
      self->previous->state == Thread::SIMD && self->previous->awaited == generation) {
    lily_mismatch(self, self->previous);
  }
#endif
  // The compiler must not keep values of shared memory in registers across this point.
  asm volatile("" ::: "memory");
  if (++group.arrived == group.live) {
    release_simdgroup(group);
    return generation & 1;
  }
  self->state = Thread::SIMD;
  self->awaited = generation;
  switch_to(self, self->next);
  while (__builtin_expect(group.generation == generation, 0)) {
    lily_reschedule(self);
  }
  self->state = Thread::RUNNING;
  return generation & 1;
}

// Waits until all live threads of the threadgroup have called.
inline void meet_threadgroup(Thread* self, Site site) {
  Simdgroup& group = *self->simdgroup;
  Threadgroup& all = *group.threadgroup;
  const uint32_t generation = all.generation;
  self->site = site;
  asm volatile("" ::: "memory");
  if (++all.arrived == all.live) {
    release_threadgroup(all);
    return;
  }
  self->state = Thread::BARRIER;
  self->awaited = generation;
  if (++group.at_barrier == group.live) {
    lily_leave_simdgroup(self);
  } else {
    switch_to(self, self->next);
  }
  while (__builtin_expect(all.generation == generation, 0)) {
    lily_reschedule(self);
  }
  self->state = Thread::RUNNING;
}

}  // namespace lily
#endif
