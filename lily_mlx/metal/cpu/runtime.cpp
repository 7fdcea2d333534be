// The scheduler of the cpu backend: threadgroups over workers, threads of a threadgroup as fibres.
#include "fibers.h"

#include "checker.h"
#include "stacks.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <sys/mman.h>

namespace lily {

__thread Thread* current_thread LILY_TLS_MODEL = nullptr;

char* Stacks::take() {
  if (free_.empty()) {
    constexpr size_t COUNT = 32;
    void* block = mmap(nullptr, COUNT * STACK_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED) {
      return nullptr;
    }
#ifdef MADV_NOHUGEPAGE
    madvise(block, COUNT * STACK_BYTES, MADV_NOHUGEPAGE);
#endif
    for (size_t i = COUNT; i-- > 0;) {
      char* stack = static_cast<char*>(block) + i * STACK_BYTES;
      mprotect(stack, GUARD_BYTES, PROT_NONE);
      all_.push_back(stack);
      free_.push_back(stack);
    }
  }
  char* stack = free_.back();
  free_.pop_back();
  return stack;
}

namespace {

// What one operating system thread needs to run threadgroups.
struct Worker {
  Job* job = nullptr;
  Stacks stacks;
  void* main_stack = nullptr;
  std::vector<Thread> threads = std::vector<Thread>(MAX_THREADS);
  std::vector<Simdgroup> simdgroups = std::vector<Simdgroup>(MAX_THREADS / SIMD_WIDTH);
  Threadgroup threadgroup{};
  alignas(64) char memory[THREADGROUP_BYTES + 64];
  Checks checks;
  bool abandoning = false;

  Worker() {
    static std::atomic<uint32_t> count{0};
    checks.worker = count++ % 64;
  }
};

thread_local Worker* worker = nullptr;

bool can_run(const Thread& t) {
  switch (t.state) {
    case Thread::UNSTARTED:
    case Thread::RUNNING: return true;
    case Thread::SIMD: return t.simdgroup->generation != t.awaited;
    case Thread::BARRIER: return t.simdgroup->threadgroup->generation != t.awaited;
    case Thread::ENDED: return false;
  }
  return false;
}

std::string waits(const Thread& t) {
  std::string text = describe(t);
  if (t.state == Thread::ENDED) {
    return text + " has ended";
  }
  if (t.site.file) {
    return text + " waits at " + t.site.operation + " (" + t.site.file + ":" + std::to_string(t.site.line) + ")";
  }
  return text + (t.state == Thread::SIMD ? " waits at a simd operation" : " waits at a threadgroup_barrier");
}

[[noreturn]] void deadlock(const Threadgroup& all) {
  // Name one thread for each place where some wait.
  std::vector<const Thread*> named;
  for (unsigned i = 0; i < all.threads; ++i) {
    const Thread& t = all.thread[i];
    const bool known = std::any_of(named.begin(), named.end(), [&](const Thread* n) {
      return n->state == t.state && same_site(n->site, t.site);
    });
    if (!known && named.size() < 4) {
      named.push_back(&t);
    }
  }
  std::string message = "a barrier or simd operation is not reached by all threads:";
  for (const Thread* t : named) {
    message += "\n  " + waits(*t);
  }
  if (!all.launch->checked) {
    message += "\n  (LILY_MLX_CHECKED=1 shows the lines)";
  }
  abandon(message);
}

Thread* any_that_can_run(Threadgroup& all, const Thread* after) {
  for (unsigned i = 1; i <= all.threads; ++i) {
    Thread& t = all.thread[(after->index + i) % all.threads];
    if (can_run(t)) {
      return &t;
    }
  }
  return nullptr;
}

Thread* thread_outside_barrier(Threadgroup& all, const Simdgroup& from) {
  for (unsigned i = 1; i <= all.simdgroups; ++i) {
    Simdgroup& s = all.simdgroup[(from.index + i) % all.simdgroups];
    if (s.live != 0 && s.at_barrier < s.live) {
      return s.first;
    }
  }
  return nullptr;
}

// Takes an ended thread out; returns a thread that has not started and may run on the same stack.
Thread* after_end(Thread* self) {
  Simdgroup& group = *self->simdgroup;
  Threadgroup& all = *group.threadgroup;
  self->state = Thread::ENDED;
  self->next->previous = self->previous;
  self->previous->next = self->next;
  if (group.first == self) {
    group.first = self->next;
  }
  group.mask &= ~(1u << self->lane);
  --group.live;
  --all.live;
  if (all.launch->checked) {
    check_end(self);
  }
  if (group.live != 0 && group.arrived == group.live) {
    release_simdgroup(group);
  }
  if (all.live != 0 && all.arrived == all.live) {
    release_threadgroup(all);
  }
  Thread* next = group.live != 0 ? self->next : nullptr;
  if (!next || !can_run(*next)) {
    next = all.live == 0 ? nullptr : thread_outside_barrier(all, group);
    if (!next || !can_run(*next)) {
      next = any_that_can_run(all, self);
    }
  }
  if (next && next->state == Thread::UNSTARTED) {
    next->stack = self->stack;
    self->stack = nullptr;
    current_thread = next;
    return next;
  }
  if (!next && all.live != 0) {
    deadlock(all);
  }
  worker->stacks.give(self->stack);
  self->stack = nullptr;
  current_thread = next;
  void* ignored;
  lily_switch(&ignored, next ? next->stack_pointer : worker->main_stack);
  __builtin_unreachable();
}

void fiber() {
  const Launch& launch = *worker->job->launch;
  for (;;) {
    Thread* self = current_thread;
    self->state = Thread::RUNNING;
    launch.entry(launch.arguments);
    after_end(self);
  }
}

void* prepare(Thread* t) {
  t->stack = worker->stacks.take();
  if (!t->stack) {
    abandon("no memory for the stacks of the kernel's threads");
  }
  return new_stack(Stacks::top(t->stack), fiber);
}

void set_up(Worker& w, const Launch& launch, uint64_t number) {
  Threadgroup& all = w.threadgroup;
  all.launch = &launch;
  const uint32_t(&groups)[3] = launch.threadgroups;
  all.position[0] = uint32_t(number % groups[0]);
  all.position[1] = uint32_t(number / groups[0] % groups[1]);
  all.position[2] = uint32_t(number / groups[0] / groups[1]);
  for (int d = 0; d < 3; ++d) {
    const uint64_t begin = uint64_t(all.position[d]) * launch.threadgroup[d];
    all.size[d] = uint32_t(std::min<uint64_t>(launch.threadgroup[d], launch.grid[d] - begin));
  }
  all.threads = all.size[0] * all.size[1] * all.size[2];
  all.simdgroups = (all.threads + SIMD_WIDTH - 1) / SIMD_WIDTH;
  all.live = all.threads;
  all.arrived = all.generation = 0;
  all.memory = w.memory + (64 - reinterpret_cast<uintptr_t>(w.memory) % 64) % 64;
  all.thread = w.threads.data();
  all.simdgroup = w.simdgroups.data();
  all.checks = &w.checks;
  uint32_t x = 0, y = 0, z = 0;
  for (unsigned s = 0; s < all.simdgroups; ++s) {
    Simdgroup& group = all.simdgroup[s];
    Thread* first = all.thread + s * SIMD_WIDTH;
    const unsigned live = std::min(SIMD_WIDTH, all.threads - s * SIMD_WIDTH);
    group.first = first;
    group.threadgroup = &all;
    group.index = s;
    group.mask = live == SIMD_WIDTH ? ~0u : (1u << live) - 1;
    group.lanes = group.mask;
    group.live = live;
    group.arrived = group.generation = group.at_barrier = 0;
    group.reduced[0] = group.reduced[1] = 0;
    for (unsigned lane = 0; lane < live; ++lane) {
      Thread& t = first[lane];
      t.stack = nullptr;
      t.next = first + (lane + 1 == live ? 0 : lane + 1);
      t.previous = first + (lane == 0 ? live - 1 : lane - 1);
      t.simdgroup = &group;
      t.lane = lane;
      t.index = s * SIMD_WIDTH + lane;
      t.position[0] = x;
      t.position[1] = y;
      t.position[2] = z;
      t.state = Thread::UNSTARTED;
      t.site = {};
      if (++x == all.size[0]) {
        x = 0;
        if (++y == all.size[1]) {
          y = 0;
          ++z;
        }
      }
    }
  }
}

}  // namespace

void run_threadgroups(Job& job) {
  if (!worker) {
    worker = new Worker;
  }
  Worker& w = *worker;
  w.job = &job;
  w.abandoning = false;
  if (job.launch->checked) {
    check_launch(w.checks);
  }
  while (!job.failed) {
    const uint64_t number = job.next.fetch_add(1);
    if (number >= job.count) {
      break;
    }
    set_up(w, *job.launch, number);
    if (job.launch->checked) {
      check_begin(w.threadgroup);
    }
    Thread* first = w.threadgroup.thread;
    first->stack = w.stacks.take();
    if (!first->stack) {
      std::lock_guard<std::mutex> lock(job.mutex);
      job.error = "no memory for the stacks of the kernel's threads";
      job.failed = true;
      break;
    }
    current_thread = first;
    lily_switch(&w.main_stack, new_stack(Stacks::top(first->stack), fiber));
    current_thread = nullptr;
    if (w.threadgroup.live != 0) {
      w.stacks.reset();
    }
  }
}

void abandon(const std::string& message) {
  worker->abandoning = true;
  {
    std::lock_guard<std::mutex> lock(worker->job->mutex);
    if (!worker->job->failed) {
      worker->job->error = message;
      worker->job->failed = true;
    }
  }
  void* ignored;
  lily_switch(&ignored, worker->main_stack);
  __builtin_unreachable();
}

bool stop_here() {
  if (!worker || worker->abandoning || !current_thread) {
    return false;
  }
  worker->abandoning = true;
  return true;
}

bool same_site(const Site& a, const Site& b) {
  const auto same = [](const char* x, const char* y) { return x == y || (x && y && std::strcmp(x, y) == 0); };
  return a.line == b.line && same(a.file, b.file) && same(a.operation, b.operation);
}

std::string describe(const Thread& t) {
  const Threadgroup& all = *t.simdgroup->threadgroup;
  char text[128];
  snprintf(text, sizeof text, "thread (%u, %u, %u) of threadgroup (%u, %u, %u)", t.position[0], t.position[1],
           t.position[2], all.position[0], all.position[1], all.position[2]);
  return text;
}

void fail(Thread* self, const std::string& message) {
  abandon(describe(*self) + ": " + message);
}

extern "C" {

void lily_start(Thread* self, Thread* next) {
  void* frame = prepare(next);
  current_thread = next;
  lily_switch(&self->stack_pointer, frame);
}

void lily_reschedule(Thread* self) {
  Threadgroup& all = *self->simdgroup->threadgroup;
  Thread* next = any_that_can_run(all, self);
  if (!next) {
    deadlock(all);
  }
  if (next != self) {
    switch_to(self, next);
  }
}

void lily_leave_simdgroup(Thread* self) {
  Threadgroup& all = *self->simdgroup->threadgroup;
  Thread* next = thread_outside_barrier(all, *self->simdgroup);
  if (next && next != self) {
    switch_to(self, next);
  }
}

void lily_threadgroup_memory_exhausted(Thread* self, const char* name, size_t bytes, Site site) {
  fail(self, std::string("threadgroup memory exceeds 32,768 bytes at ") + name + " (" + std::to_string(bytes) +
                 " bytes, " + site.file + ":" + std::to_string(site.line) + ")");
}

void lily_absent_lane(Thread* self, uint32_t lane) {
  const Site& s = self->site;
  fail(self, std::string(s.operation) + " reads lane " + std::to_string(int32_t(lane)) +
                 ", which takes no part (" + s.file + ":" + std::to_string(s.line) + ")");
}

void lily_multiply_8x8(float* d, const float* a, const float* b, const float* c) {
  typedef float Row __attribute__((vector_size(32), aligned(4)));
  Row rows[8];
  for (int k = 0; k < 8; ++k) {
    rows[k] = *reinterpret_cast<const Row*>(b + 8 * k);
  }
  for (int i = 0; i < 8; ++i) {
    Row sum = *reinterpret_cast<const Row*>(c + 8 * i);
    for (int k = 0; k < 8; ++k) {
      sum += a[8 * i + k] * rows[k];
    }
    *reinterpret_cast<Row*>(d + 8 * i) = sum;
  }
}

}  // extern "C"
}  // namespace lily
