#include "runtime.h"
namespace lily {
void check_begin(Threadgroup&, uint64_t) {}
void check_end(Thread*) {}
}
