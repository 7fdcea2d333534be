// Stacks of fibres: a pool for each worker, kept between launches.
#ifndef LILY_CPU_STACKS
#define LILY_CPU_STACKS
#include <stddef.h>
#include <stdint.h>
#include <vector>

namespace lily {

constexpr size_t STACK_BYTES = 256 * 1024;  // of address space; only touched pages take memory
constexpr size_t GUARD_BYTES = 64 * 1024;   // a multiple of every page size in use
constexpr size_t MAX_COLOUR = 32 * 128;

// A frame from which lily_switch calls `entry` on the stack that ends at `top`, aligned to 16.
void* new_stack(char* top, void (*entry)());

class Stacks {
 public:
  // Lowest address of a stack; null if the system gives no more memory.
  char* take();
  void give(char* stack) { free_.push_back(stack); }
  // Takes back all stacks that are out.
  void reset() { free_ = all_; }
  // Where the stack starts. Stacks begin at different distances from a page boundary: otherwise the live parts
  // of all of them would compete for the same few cache sets.
  static char* top(char* stack) {
    return stack + STACK_BYTES - (reinterpret_cast<uintptr_t>(stack) / STACK_BYTES % 32) * 128 - 128;
  }
  bool holds_guard(const void* address) const;

 private:
  std::vector<char*> free_, all_;
};

}  // namespace lily
#endif
