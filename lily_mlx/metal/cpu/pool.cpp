// Launches: threadgroups over a pool of operating system threads that is kept from one to the next.
#include "checker.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <pthread.h>
#include <thread>
#include <ucontext.h>
#include <unistd.h>

namespace lily {
namespace {

void time_is_up(int, siginfo_t*, void* context) {
  if (!stop_here()) {
    return;
  }
  const void* instruction = nullptr;
  const auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__linux__) && defined(__x86_64__)
  instruction = reinterpret_cast<void*>(machine.gregs[REG_RIP]);
#elif defined(__linux__) && defined(__aarch64__)
  instruction = reinterpret_cast<void*>(machine.pc);
#elif defined(__APPLE__) && defined(__aarch64__)
  instruction = reinterpret_cast<void*>(machine->__ss.__pc);
#else
  (void)machine;
#endif
  fail(current_thread, "the kernel did not end in time (LILY_MLX_TIMEOUT sets the seconds)\n  at " + place_of(instruction));
}

// Workers that wait for launches. The calling thread works too.
class Pool {
 public:
  void run(Job& job) {
    std::lock_guard<std::mutex> one_launch(launches_);
    // In checked mode the caller only watches the clock.
    const bool checked = job.launch->checked;
    const unsigned helpers = unsigned(std::min<uint64_t>(checked ? job.count : job.count - 1, limit_ + checked));
    if (helpers > 0) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        job_ = &job;
        ++ticket_;
        while (threads_ < helpers) {
          std::thread(&Pool::work, this).detach();
          ++threads_;
        }
      }
      for (unsigned i = 0; i < helpers; ++i) {
        wake_.notify_one();
      }
    }
    if (!checked) {
      run_threadgroups(job);
    }
    if (helpers > 0) {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto done = [&] { return active_ == 0 && (!checked || job.next >= job.count || job.failed); };
      if (checked && !idle_.wait_for(lock, std::chrono::duration<double>(job.timeout), done)) {
        interrupt(job, lock, done);
      }
      job_ = nullptr;
      idle_.wait(lock, [&] { return active_ == 0; });
    }
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    uint64_t seen = 0;
    for (;;) {
      wake_.wait(lock, [&] { return job_ && ticket_ != seen; });
      seen = ticket_;
      Job* job = job_;
      ++active_;
      job->running.push_back(pthread_self());
      lock.unlock();
      run_threadgroups(*job);
      lock.lock();
      if (--active_ == 0) {
        idle_.notify_one();
      }
    }
  }

  // Stops the workers of a launch that takes too long, wherever they are.
  template <typename F>
  void interrupt(Job& job, std::unique_lock<std::mutex>& lock, F done) {
    struct sigaction action = {}, previous = {};
    action.sa_sigaction = time_is_up;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGUSR2, &action, &previous);
    for (int attempt = 0; attempt < 50 && !done(); ++attempt) {
      for (pthread_t thread : job.running) {
        pthread_kill(thread, SIGUSR2);
      }
      idle_.wait_for(lock, std::chrono::milliseconds(200), done);
    }
    sigaction(SIGUSR2, &previous, nullptr);
  }

  const unsigned limit_ = std::min(std::max(std::thread::hardware_concurrency(), 1u), 32u) - 1;
  std::mutex launches_, mutex_;
  std::condition_variable wake_, idle_;
  Job* job_ = nullptr;
  uint64_t ticket_ = 0;
  unsigned threads_ = 0, active_ = 0;
};

// The pool outlives everything, and a forked child makes its own.
Pool& pool() {
  static std::mutex mutex;
  static Pool* instance = nullptr;
  static pid_t owner = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) {
    owner = getpid();
    instance = new Pool;
  }
  return *instance;
}

// Runs a launch. Returns null, or a message that stays until the calling thread's next launch.
const char* run(Launch launch, double timeout) {
  thread_local std::string message;
  Job job;
  job.timeout = timeout;
  job.count = 1;
  for (int d = 0; d < 3; ++d) {
    launch.threadgroup[d] = std::min(launch.threadgroup[d], launch.grid[d]);
    launch.threadgroups[d] = (launch.grid[d] + launch.threadgroup[d] - 1) / launch.threadgroup[d];
    job.count *= launch.threadgroups[d];
  }
  job.launch = &launch;
  pool().run(job);
  if (!job.failed) {
    return nullptr;
  }
  message = job.error;
  return message.c_str();
}

Launch make_launch(const void* entry, void* const* arguments, const uint32_t (&sizes)[6], bool checked) {
  Launch launch{};
  launch.entry = reinterpret_cast<void (*)(void* const*)>(reinterpret_cast<uintptr_t>(entry));
  launch.arguments = arguments;
  std::copy_n(sizes, 3, launch.grid);
  std::copy_n(sizes + 3, 3, launch.threadgroup);
  launch.checked = checked;
  return launch;
}

}  // namespace

extern "C" {

// Runs a kernel on the buffers at `arguments`; returns null or an error message.
const char* lily_run(const void* entry, void* const* arguments, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t tx,
                     uint32_t ty, uint32_t tz) {
  return run(make_launch(entry, arguments, {gx, gy, gz, tx, ty, tz}, false), 0);
}

// The same in checked mode, on copies of the buffers; ends after `timeout` seconds.
const char* lily_run_checked(const void* entry, const Buffer* buffers, size_t count, double timeout, uint32_t gx,
                             uint32_t gy, uint32_t gz, uint32_t tx, uint32_t ty, uint32_t tz) {
  static std::mutex one_launch;
  std::lock_guard<std::mutex> lock(one_launch);
  std::vector<void*> arguments(count + 1);
  if (!enter_arena(buffers, count, arguments.data())) {
    return "no memory for checked copies of the buffers";
  }
  check_library(entry);
  const char* message = run(make_launch(entry, arguments.data(), {gx, gy, gz, tx, ty, tz}, true), timeout);
  leave_arena();
  return message;
}

// The addresses of Python objects with a buffer. Returns the number of the first one that is not
// row-contiguous, -1 if there is none, or -2 - number for one that has no buffer. Needs Python's lock.
int64_t lily_addresses(void* get, void* release, void* const* objects, size_t count, uintptr_t* addresses) {
  struct PythonBuffer {  // Py_buffer
    void *buf, *obj;
    ptrdiff_t len, itemsize;
    int readonly, ndim;
    char* format;
    ptrdiff_t *shape, *strides, *suboffsets;
    void* internal;
  } buffer;
  constexpr int STRIDES = 0x18;  // PyBUF_STRIDES
  const auto get_buffer = reinterpret_cast<int (*)(void*, PythonBuffer*, int)>(get);
  const auto release_buffer = reinterpret_cast<void (*)(PythonBuffer*)>(release);
  int64_t strided = -1;
  for (size_t i = 0; i < count; ++i) {
    if (get_buffer(objects[i], &buffer, STRIDES) != 0) {
      return -2 - int64_t(i);
    }
    addresses[i] = reinterpret_cast<uintptr_t>(buffer.buf);
    ptrdiff_t expected = buffer.itemsize;
    for (int d = buffer.ndim - 1; d >= 0; --d) {
      if (buffer.shape[d] != 1 && buffer.strides[d] != expected && buffer.len != 0 && strided < 0) {
        strided = int64_t(i);
      }
      expected *= buffer.shape[d];
    }
    release_buffer(&buffer);
  }
  return strided;
}

}  // extern "C"
}  // namespace lily
