#include "checker.h"

#include "stacks.h"

#include <algorithm>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <sys/mman.h>
#if defined(__linux__)
#include <link.h>
#endif

namespace lily {
namespace {

constexpr size_t PAGE = 4096;
constexpr size_t GAP = size_t(1) << 20;  // between buffers, so that a wrong index meets no other buffer
constexpr int POISON = 0xff;             // a NaN in every floating-point type

struct Arena {
  char* base = nullptr;
  size_t capacity = 0, size = 0;
  std::vector<Region> regions;
  std::vector<Buffer> buffers;
  std::vector<uint8_t> owner;  // of each page: index of the nearest region
  std::vector<std::vector<Cell>> cells;
  uintptr_t library = 0, library_end = 0;
} arena;

char* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
}

// The place of a call in the kernel, to be turned into a line by whoever reads the message.
std::string place(uint32_t offset) {
  char text[32];
  snprintf(text, sizeof text, "\x01%x\x02", offset ? offset - 1 : 0);
  return text;
}

std::string name_element(const Region& r, const char* address) {
  const char* kinds[] = {"input", "output", "threadgroup array"};
  const ptrdiff_t size = ptrdiff_t(r.element), offset = address - r.begin;
  const ptrdiff_t element = (offset < 0 ? offset - size + 1 : offset) / size;
  return std::string(kinds[r.kind]) + " " + r.name + "[" + std::to_string(element) + "]";
}

std::string thread_of(const Thread* self, const Access& access, bool same_threadgroup) {
  const Threadgroup& all = *self->simdgroup->threadgroup;
  if (same_threadgroup) {
    return access.thread == self->index ? "another thread" : describe(all.thread[access.thread]);
  }
  return "a thread of another threadgroup";
}

}  // namespace

std::string place_of(const void* instruction) {
  return place(uint32_t(reinterpret_cast<uintptr_t>(instruction) - arena.library) + 1);
}

namespace {

[[noreturn]] void report(Thread* self, uint32_t here, const std::string& what) {
  fail(self, what + "\n  at " + place(here));
}

[[noreturn]] void report_race(
    Thread* self, const Region& r, const char* address, bool writes, const Cell& cell, bool other_writes,
    bool same_threadgroup, uint32_t here) {
  const Access& other = other_writes ? cell.write : cell.read;
  std::string text = std::string(writes ? "writes " : "reads ") + name_element(r, address) + ", which ";
  text += thread_of(self, other, same_threadgroup);
  text += other_writes ? (other.atomic ? " changed atomically" : " wrote") : " read";
  text += same_threadgroup ? " with no barrier between that orders this memory" : "";
  text += "\n  at " + place(here) + "\n  the other at " + place(other_writes ? cell.write_place : cell.read_place);
  fail(self, text);
}

struct Now {
  uint32_t interval, first;
  uint16_t ordered;
};

// Whether an earlier access of another thread is ordered before this one by a barrier.
bool is_ordered(const Threadgroup& all, const Thread* self, const Access& other, const Now& now, bool reads) {
  if (other.interval != now.interval) {
    return true;
  }
  const Thread& t = all.thread[other.thread];
  if (reads && other.several == 2) {
    return false;
  }
  if (t.simdgroup == self->simdgroup && other.ordered != now.ordered) {
    return true;
  }
  return &t == self && !(reads && other.several != 0);
}

bool writes_memory(Mode mode) { return mode != READ && mode != ATOMIC_LOAD; }

Access exchange(Access& cell, const Access& access) {
  Access before;
  __atomic_exchange(&cell, const_cast<Access*>(&access), &before, __ATOMIC_RELAXED);
  return before;
}

// Whether an access was made by a thread of this threadgroup.
bool is_ours(const Access& access, const Now& now) {
  return access.interval >= now.first && access.interval <= now.interval;
}

void touch_to_read(Thread* self, Cell& cell, Access access, uint32_t here) {
  Access& last = cell.read;
  if (last.interval == access.interval && last.thread != access.thread) {
    const Thread& other = self->simdgroup->threadgroup->thread[last.thread];
    const bool together = other.simdgroup == self->simdgroup && last.several != 2;
    access.several = together ? (last.ordered == access.ordered ? 1 : 0) : 2;
  } else if (last.interval == access.interval) {
    access.several = last.several == 1 && last.ordered != access.ordered ? 0 : last.several;
  }
  const bool among_others = access.several != 0;
  access.atomic = access.atomic && (!among_others || last.atomic);
  if (among_others && last.thread != access.thread && (access.atomic || !last.atomic)) {
    access.thread = last.thread;  // a message names the first of several readers
  } else {
    cell.read_place = here;
  }
  last = access;
}

void touch(Thread* self, const Region& r, Cell& cell, char* address, Mode mode, const Now& now, uint32_t here) {
  const Threadgroup& all = *self->simdgroup->threadgroup;
  const bool writes = writes_memory(mode);
  Access access{};
  access.interval = now.interval;
  access.ordered = now.ordered;
  access.thread = uint16_t(self->index);
  access.atomic = mode >= ATOMIC_LOAD;
  Cell before = cell;
  if (writes) {
    // Two threadgroups may run at once: one of the two must see the other's write.
    before.write = r.kind == Region::OUTPUT ? exchange(cell.write, access) : cell.write;
  }
  if (before.write.interval == 0) {
    if (mode != WRITE && mode != ATOMIC_STORE) {
      report(self, here, "reads " + name_element(r, address) + ", which nobody has written");
    }
  } else if (!(access.atomic && before.write.atomic)) {
    const bool ours = is_ours(before.write, now);
    if (!ours || !is_ordered(all, self, before.write, now, false)) {
      report_race(self, r, address, writes, before, true, ours, here);
    }
  }
  if (!writes) {
    touch_to_read(self, cell, access, here);
    return;
  }
  if (before.read.interval != 0 && !(access.atomic && before.read.atomic)) {
    const bool ours = is_ours(before.read, now);
    if (!ours || !is_ordered(all, self, before.read, now, true)) {
      report_race(self, r, address, true, before, false, ours, here);
    }
  }
  cell.write = access;
  cell.write_place = here;
}

void touch_all(Thread* self, const Region& r, char* address, size_t size, Mode mode, uint32_t here) {
  const size_t offset = size_t(address - r.begin);
  const Checks& checks = *self->simdgroup->threadgroup->checks;
  const bool is_array = r.kind == Region::THREADGROUP;
  const Now now{checks.interval[is_array ? 0 : 1], checks.first,
                uint16_t(self->simdgroup->ordered[is_array ? 0 : 1])};
  if (size < (size_t(1) << r.shift)) {
    return;  // smaller than a cell: two threads may share it rightly
  }
  for (size_t i = offset >> r.shift; i <= (offset + size - 1) >> r.shift; ++i) {
    touch(self, r, r.cells[i], r.begin + (i << r.shift), mode, now, here);
  }
}

[[noreturn]] void out_of_bounds(Thread* self, const Region& r, char* address, size_t size, bool writes, uint32_t here) {
  report(self, here, std::string(writes ? "writes " : "reads ") + std::to_string(size) + " bytes out of bounds: " +
                         name_element(r, address) + " of " + std::to_string(r.bytes / r.element) + " elements");
}

bool is_runtime(Thread* self, uintptr_t address) {
  const Threadgroup& all = *self->simdgroup->threadgroup;
  const auto inside = [address](const void* begin, size_t bytes) {
    return address - reinterpret_cast<uintptr_t>(begin) < bytes;
  };
  return inside(all.simdgroup, sizeof(Simdgroup) * all.simdgroups) || inside(all.thread, sizeof(Thread) * all.threads) ||
         inside(&all, sizeof all) || inside(all.launch, sizeof(Launch)) || inside(&current_thread, sizeof current_thread) ||
         inside(all.launch->arguments, sizeof(void*) * (arena.regions.size() + 1));
}

}  // namespace

void access(void* pointer, size_t size, Mode mode, bool aligned, void* caller) {
  Thread* self = current_thread;
  if (!self) {
    return;
  }
  char* address = static_cast<char*>(pointer);
  if (size_t(address - self->stack) < STACK_BYTES) {
    return;
  }
  const bool writes = writes_memory(mode);
  const uint32_t here = uint32_t(reinterpret_cast<uintptr_t>(caller) - arena.library);
  Checks& checks = *self->simdgroup->threadgroup->checks;
  const Region* region = nullptr;
  // The last quarter of an array's space is before the next array.
  const size_t in_array = size_t(address - checks.memory) + ARRAY_SPACE / 4, in_arena = size_t(address - arena.base);
  if (in_array < checks.arrays.size() * ARRAY_SPACE) {
    region = &checks.arrays[in_array / ARRAY_SPACE];
  } else if (in_arena < arena.size) {
    region = &arena.regions[arena.owner[in_arena / PAGE]];
  }
  if (!region) {
    const uintptr_t a = reinterpret_cast<uintptr_t>(address);
    if ((a >= arena.library && a < arena.library_end && !writes) || is_runtime(self, a)) {
      return;
    }
    char text[64];
    snprintf(text, sizeof text, "%s address %p, which is in no buffer", writes ? "writes" : "reads", pointer);
    report(self, here, text);
  }
  if (address < region->begin || size_t(address - region->begin) + size > region->bytes) {
    out_of_bounds(self, *region, address, size, writes, here);
  }
  if (aligned && (reinterpret_cast<uintptr_t>(address) & (size - 1)) != 0) {
    report(self, here, std::string(writes ? "writes " : "reads ") + std::to_string(size) + " bytes at " +
                           name_element(*region, address) + ", which is not aligned to " + std::to_string(size) + " bytes");
  }
  if (region->kind == Region::INPUT) {
    if (writes) {
      report(self, here, "writes to " + name_element(*region, address));
    }
    return;
  }
  touch_all(self, *region, address, size, mode, here);
}

namespace {

std::string at(const Site& s) {
  return std::string(s.operation) + " (" + s.file + ":" + std::to_string(s.line) + ")";
}

const Thread* ended_thread(const Threadgroup& all, const Simdgroup* only) {
  for (unsigned i = 0; i < all.threads; ++i) {
    if (all.thread[i].state == Thread::ENDED && (!only || all.thread[i].simdgroup == only)) {
      return &all.thread[i];
    }
  }
  return nullptr;
}

[[noreturn]] void not_reached(const Thread& waiting, const Site& site, const Thread& ended) {
  abandon("a barrier or simd operation is not reached by all threads:\n  " + describe(waiting) + " is at " + at(site) +
          "\n  " + describe(ended) + " has ended");
}

[[noreturn]] void different(const Thread& a, const Site& at_a, const Thread& b, const Site& at_b) {
  abandon("threads are at different barriers or simd operations:\n  " + describe(a) + " is at " + at(at_a) + "\n  " +
          describe(b) + " is at " + at(at_b));
}

// Some thread that waits at `site`.
template <typename F>
const Thread* waiting(const Threadgroup& all, F match) {
  for (unsigned i = 0; i < all.threads; ++i) {
    if (match(all.thread[i])) {
      return &all.thread[i];
    }
  }
  return nullptr;
}

unsigned shift_for(size_t element) { return element == 1 ? 0 : 1; }

uint32_t next_interval(Checks& checks) {
  return checks.worker << 26 | (++checks.counter & ((1u << 26) - 1));
}

}  // namespace

bool enter_arena(const Buffer* buffers, size_t count, void** arguments) {
  arena.buffers.assign(buffers, buffers + count);
  arena.regions.clear();
  size_t size = GAP;
  std::vector<size_t> starts;
  for (size_t i = 0; i < count; ++i) {
    starts.push_back(size);
    size += (buffers[i].bytes + buffers[i].misalignment + GAP + PAGE - 1) / PAGE * PAGE;
  }
  if (size > arena.capacity) {
    if (arena.base) {
      munmap(arena.base, arena.capacity);
    }
    arena.base = reserve(size);
    arena.capacity = arena.base ? size : 0;
    if (!arena.base) {
      arena.regions.clear();
      return false;
    }
  }
  arena.size = size;
  arena.owner.assign(size / PAGE, 0);
  arena.cells.resize(std::max(arena.cells.size(), count));
  for (size_t i = 0; i < count; ++i) {
    const Buffer& b = buffers[i];
    Region r{b.name, b.is_output ? Region::OUTPUT : Region::INPUT, arena.base + starts[i] + b.misalignment,
             b.bytes, std::max<size_t>(b.element, 1), shift_for(b.element), nullptr};
    if (b.is_output) {
      memset(r.begin, POISON, b.bytes);
      arena.cells[i].assign((b.bytes >> r.shift) + 1, Cell{});
      r.cells = arena.cells[i].data();
    } else {
      memcpy(r.begin, b.data, b.bytes);
    }
    // A page between two buffers belongs to the nearer one.
    const size_t from = (starts[i] - GAP / 2) / PAGE;
    std::fill(arena.owner.begin() + ptrdiff_t(i == 0 ? 0 : from), arena.owner.end(), uint8_t(i));
    arguments[i] = r.begin;
    arena.regions.push_back(r);
  }
  return true;
}

void leave_arena() {
  for (size_t i = 0; i < arena.regions.size(); ++i) {
    if (arena.buffers[i].is_output) {
      memcpy(arena.buffers[i].data, arena.regions[i].begin, arena.regions[i].bytes);
    }
  }
}

void check_library(const void* entry) {
  Dl_info info{};
  dladdr(entry, &info);
  arena.library = reinterpret_cast<uintptr_t>(info.dli_fbase);
  arena.library_end = arena.library + (size_t(1) << 22);
#if defined(__linux__)
  dl_iterate_phdr(
      [](dl_phdr_info* module, size_t, void*) {
        for (int i = 0; module->dlpi_addr == arena.library && i < module->dlpi_phnum; ++i) {
          const auto& segment = module->dlpi_phdr[i];
          if (segment.p_type == PT_LOAD) {
            arena.library_end = arena.library + segment.p_vaddr + segment.p_memsz;
          }
        }
        return 0;
      },
      nullptr);
#endif
}

void check_launch(Checks& checks) {
  checks.counter = 0;
  if (!checks.memory) {
    // Space before the first array, too.
    checks.memory = reserve((MAX_ARRAYS + 1) * ARRAY_SPACE) + ARRAY_SPACE;
  }
}

void check_begin(Threadgroup& all) {
  Checks& checks = *all.checks;
  checks.first = checks.interval[0] = checks.interval[1] = next_interval(checks);
  checks.arrays.clear();
  all.site = {};
  for (unsigned i = 0; i < all.simdgroups; ++i) {
    all.simdgroup[i].ordered[0] = all.simdgroup[i].ordered[1] = 0;
  }
}

void check_end(Thread* self) {
  const Simdgroup& group = *self->simdgroup;
  const Threadgroup& all = *group.threadgroup;
  if (group.arrived != 0) {
    const Thread* t = waiting(all, [&](const Thread& o) {
      return o.simdgroup == &group && o.state == Thread::SIMD && o.awaited == group.generation;
    });
    if (t) {
      not_reached(*t, t->site, *self);
    }
  }
  if (all.arrived != 0) {
    const Thread* t = waiting(all, [&](const Thread& o) { return o.state == Thread::BARRIER && o.awaited == all.generation; });
    if (t) {
      not_reached(*t, t->site, *self);
    }
  }
}

extern "C" {

void lily_check_simdgroup(Thread* self, Site site) {
  Simdgroup& group = *self->simdgroup;
  self->site = site;
  if (group.mask != group.lanes) {
    not_reached(*self, site, *ended_thread(*group.threadgroup, &group));
  }
  if (group.arrived == 0) {
    group.site = site;
  } else if (!same_site(group.site, site)) {
    const Thread* other = waiting(*group.threadgroup, [&](const Thread& o) {
      return o.simdgroup == &group && o.state == Thread::SIMD && o.awaited == group.generation;
    });
    different(*other, group.site, *self, site);
  }
}

void lily_check_threadgroup(Thread* self, Site site) {
  Threadgroup& all = *self->simdgroup->threadgroup;
  self->site = site;
  if (all.live != all.threads) {
    not_reached(*self, site, *ended_thread(all, nullptr));
  }
  if (all.arrived == 0) {
    all.site = site;
  } else if (!same_site(all.site, site)) {
    const Thread* other =
        waiting(all, [&](const Thread& o) { return o.state == Thread::BARRIER && o.awaited == all.generation; });
    different(*other, all.site, *self, site);
  }
}

void lily_order_threadgroup(Threadgroup* all, unsigned order) {
  Checks& checks = *all->checks;
  const uint32_t next = next_interval(checks);
  if (order & ORDER_THREADGROUP) {
    checks.interval[0] = next;
  }
  if (order & ORDER_DEVICE) {
    checks.interval[1] = next;
  }
}

char* lily_checked_array(Thread* self, unsigned number, size_t bytes, size_t element, const char* name, Site site) {
  Checks& checks = *self->simdgroup->threadgroup->checks;
  if (number >= MAX_ARRAYS) {
    fail(self, "more than 64 threadgroup arrays at " + at(site));
  }
  if (number == checks.arrays.size()) {
    Region r{name, Region::THREADGROUP, checks.memory + number * ARRAY_SPACE, bytes, element, shift_for(element), nullptr};
    memset(r.begin, POISON, bytes);
    checks.cells[number].assign((bytes >> r.shift) + 1, Cell{});
    r.cells = checks.cells[number].data();
    checks.arrays.push_back(r);
  }
  return checks.arrays[number].begin;
}

}  // extern "C"
}  // namespace lily
