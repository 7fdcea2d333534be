// Inside the runtime: messages, and the hooks of the checked mode.
#ifndef LILY_CPU_RUNTIME
#define LILY_CPU_RUNTIME
#include "fibers.h"

#include <string>

namespace lily {

// "thread (0, 0, 0) of threadgroup (0, 0, 0)"
std::string describe(const Thread& thread);
bool same_site(const Site& a, const Site& b);
// Ends the launch with a message; never returns. Fibres that are suspended are dropped.
[[noreturn]] void abandon(const std::string& message);
// Ends the launch with a message about the running thread; never returns.
[[noreturn]] void fail(Thread* self, const std::string& message);

// Checked mode: before a threadgroup starts, and after a thread has ended.
void check_begin(Threadgroup& all, uint64_t number);
void check_end(Thread* self);

}  // namespace lily
#endif
