// Inside the runtime: messages, and the hooks of the checked mode.
#ifndef LILY_CPU_RUNTIME
#define LILY_CPU_RUNTIME
#include "fibers.h"

#include <atomic>
#include <mutex>
#include <pthread.h>
#include <string>
#include <vector>

namespace lily {

// A launch in progress.
struct Job {
  const Launch* launch;
  uint64_t count;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::string error;
  double timeout = 0;  // seconds; checked mode
  std::vector<pthread_t> running;
};

// Runs threadgroups of a launch until none is left; every worker calls it.
void run_threadgroups(Job& job);
// In a signal handler: whether the interrupted code is a kernel that may be abandoned now.
bool stop_here();

// "thread (0, 0, 0) of threadgroup (0, 0, 0)"
std::string describe(const Thread& thread);
bool same_site(const Site& a, const Site& b);
// Ends the launch with a message; never returns. Fibres that are suspended are dropped.
[[noreturn]] void abandon(const std::string& message);
// Ends the launch with a message about the running thread; never returns.
[[noreturn]] void fail(Thread* self, const std::string& message);

// Checked mode: before a threadgroup starts, and after a thread has ended.
void check_begin(Threadgroup& all);
void check_end(Thread* self);

}  // namespace lily
#endif
