// The checked mode: a copy of every buffer, and what happened to each element of memory that threads share.
//
// The kernel is compiled with the compiler's thread sanitizer, whose calls before each load and store come
// here (`__tsan_read4` and so on) instead of to its own runtime.
//
// Time inside a threadgroup is divided into intervals by the barriers that order memory. Two accesses of
// different threads are a race if they fall into one interval, one of them writes, and no simdgroup_barrier
// lies between them (which orders the threads of one simdgroup only).
#ifndef LILY_CPU_CHECKER
#define LILY_CPU_CHECKER
#include "runtime.h"

#include <vector>

namespace lily {

// The last access of one kind to an element. Zero means none.
struct alignas(8) Access {
  uint32_t interval;  // unique in a launch
  uint16_t ordered;   // simdgroup_barriers of that thread's simdgroup before it
  uint16_t thread : 10;
  uint16_t several : 2;  // readers: one thread, several of a simdgroup, threads of several simdgroups
  uint16_t atomic : 1;
};

struct Cell {
  Access write;
  Access read;
  uint32_t write_place;  // return address, from the start of the kernel's library
  uint32_t read_place;
};

// A buffer or an array of threadgroup memory.
struct Region {
  const char* name;
  enum Kind { INPUT, OUTPUT, THREADGROUP } kind;
  char* begin;
  size_t bytes;
  size_t element;  // bytes
  unsigned shift;  // log2 of the bytes of a cell
  Cell* cells;     // null for inputs
};

constexpr size_t ARRAY_SPACE = 128 * 1024;  // address space of an array of threadgroup memory
constexpr unsigned MAX_ARRAYS = 64;

// What a worker needs for checks.
struct Checks {
  uint32_t worker;
  uint32_t counter = 0;   // intervals begun in this launch
  uint32_t interval[2];   // the current one, for threadgroup memory and for buffers
  uint32_t first;         // the first one of this threadgroup
  char* memory = nullptr;  // MAX_ARRAYS * ARRAY_SPACE
  std::vector<Region> arrays;
  std::vector<std::vector<Cell>> cells = std::vector<std::vector<Cell>>(MAX_ARRAYS);
};

// A buffer as the caller passes it.
struct Buffer {
  const char* name;
  void* data;
  uint64_t bytes;
  uint32_t element;
  uint32_t is_output;
  uint32_t misalignment;  // of its address, modulo 16
};

enum Mode { READ, WRITE, ATOMIC_LOAD, ATOMIC_STORE, ATOMIC_UPDATE };
// Checks an access of the running thread. `caller` is the return address into the kernel.
void access(void* pointer, size_t size, Mode mode, bool aligned, void* caller);

// Where an instruction of the kernel stands, for messages.
std::string place_of(const void* instruction);
// Before a launch: where the kernel's library is; for each worker, its own state.
void check_library(const void* entry);
void check_launch(Checks& checks);
// Copies the buffers to guarded memory, sets `arguments` to the copies and marks the outputs unwritten.
// Returns false if there is no memory for them.
bool enter_arena(const Buffer* buffers, size_t count, void** arguments);
// Copies the outputs back.
void leave_arena();

}  // namespace lily
#endif
