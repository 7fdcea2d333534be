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

// Code that the checked mode must not watch.
#ifdef LILY_CHECKED
#define LILY_UNTRACED __attribute__((no_sanitize("thread")))
#else
#define LILY_UNTRACED
#endif

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

// One Metal thread. What a switch needs is in one cache line.
struct alignas(64) Thread {
  void* stack_pointer;   // while suspended
  Thread* next;          // ring of the live threads of the simdgroup
  Thread* previous;
  Simdgroup* simdgroup;
  char* stack;           // lowest address; null before the thread starts and after it ends
  uint32_t lane;         // thread_index_in_simdgroup
  uint32_t index;        // thread_index_in_threadgroup
  enum State : uint32_t { UNSTARTED, RUNNING, SIMD, BARRIER, ENDED } state;
  uint32_t awaited;      // the generation that this thread waits for the end of
  uint32_t position[3];  // thread_position_in_threadgroup
  Site site;             // checked mode: where it waits
};

// What a barrier orders, as in mem_flags.
enum Order : unsigned { ORDER_NONE = 0, ORDER_DEVICE = 1, ORDER_THREADGROUP = 2 };

// Up to 32 threads whose simd operations go together.
struct Simdgroup {
  Thread* first;           // some live thread
  Threadgroup* threadgroup;
  uint32_t index;
  uint32_t mask;           // live lanes
  uint32_t lanes;          // lanes at the start
  uint32_t live;
  uint32_t arrived;        // at the current simd operation
  uint32_t generation;     // simd operations completed
  uint32_t at_barrier;     // waiting at the threadgroup barrier
  Site site;               // checked mode: the operation that the first to arrive is in
  uint32_t ordered[2];     // checked mode: simdgroup_barriers that ordered each kind of memory
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
  Site site;            // checked mode: the barrier that the first to arrive is at
  struct Checks* checks;
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

// The checked mode. A thread has arrived at a collective; the last one orders memory.
void lily_check_simdgroup(Thread* self, Site site);
void lily_check_threadgroup(Thread* self, Site site);
void lily_order_threadgroup(Threadgroup* all, unsigned order);
// The `number`-th array of threadgroup memory of a kernel.
char* lily_checked_array(Thread* self, unsigned number, size_t bytes, size_t element, const char* name, Site site);
// Reports that a simd operation reads a lane that did not take part.
[[noreturn]] void lily_absent_lane(Thread* self, uint32_t lane);
// d = c + a b for 8x8 matrices of float, row by row.
void lily_multiply_8x8(float* d, const float* a, const float* b, const float* c);
}

LILY_UNTRACED inline void switch_to(Thread* self, Thread* next) {
  if (__builtin_expect(next->state == Thread::UNSTARTED, 0)) {
    lily_start(self, next);
  } else {
    current_thread = next;
    lily_switch(&self->stack_pointer, next->stack_pointer);
  }
}

LILY_UNTRACED inline void release_simdgroup(Simdgroup& group) {
  group.participants[group.generation & 1] = group.mask;
  group.arrived = 0;
  ++group.generation;
}

LILY_UNTRACED inline void release_threadgroup(Threadgroup& all) {
  all.arrived = 0;
  ++all.generation;
  for (unsigned i = 0; i < all.simdgroups; ++i) {
    all.simdgroup[i].at_barrier = 0;
  }
}

// Waits until all live threads of the simdgroup have called. Values written to values[parity] before the
// call are visible to all of them afterwards; returns that parity.
LILY_UNTRACED inline unsigned meet_simdgroup(Thread* self, [[maybe_unused]] Site site, unsigned order = ORDER_NONE) {
  Simdgroup& group = *self->simdgroup;
  const uint32_t generation = group.generation;
#ifdef LILY_CHECKED
  lily_check_simdgroup(self, site);
#endif
  // The compiler must not keep values of shared memory in registers across this point.
  asm volatile("" ::: "memory");
  if (++group.arrived == group.live) {
    release_simdgroup(group);
    group.ordered[0] += order / ORDER_THREADGROUP;
    group.ordered[1] += order % ORDER_THREADGROUP;
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
LILY_UNTRACED inline void meet_threadgroup(Thread* self, [[maybe_unused]] Site site, [[maybe_unused]] unsigned order) {
  Simdgroup& group = *self->simdgroup;
  Threadgroup& all = *group.threadgroup;
  const uint32_t generation = all.generation;
#ifdef LILY_CHECKED
  lily_check_threadgroup(self, site);
#endif
  asm volatile("" ::: "memory");
  if (++all.arrived == all.live) {
    release_threadgroup(all);
#ifdef LILY_CHECKED
    lily_order_threadgroup(&all, order);
#endif
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
