// Barriers and the operations of a simdgroup.
#ifndef LILY_CPU_SIMD
#define LILY_CPU_SIMD
#include "fibers.h"
#include "math.h"

// The place of a call, for messages of the checked mode.
#ifdef LILY_CHECKED
#define LILY_SITE(OPERATION) lily::Site site = {__builtin_FILE(), __builtin_LINE(), OPERATION}
#else
#define LILY_SITE(OPERATION) lily::Site site = {}
#endif

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
enum memory_order { memory_order_relaxed, memory_order_seq_cst, memory_order_acquire, memory_order_release,
                    memory_order_acq_rel };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

LILY_UNTRACED inline void threadgroup_barrier(mem_flags flags, LILY_SITE("threadgroup_barrier")) {
  lily::meet_threadgroup(lily::current_thread, site, unsigned(flags) % 4);
}
LILY_UNTRACED inline void simdgroup_barrier(mem_flags flags, LILY_SITE("simdgroup_barrier")) {
  lily::meet_simdgroup(lily::current_thread, site, unsigned(flags) % 4);
}
inline void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace metal

namespace lily {

// One simd operation: this thread's value is shared, and all values can be read.
template <typename T>
struct Exchange {
  static_assert(sizeof(T) <= MAX_VALUE_BYTES, "simd operations take values of at most 16 bytes");
  Thread* self;
  Simdgroup& group;
  unsigned parity;
  uint32_t generation;
  T* values;

  LILY_UNTRACED Exchange(T value, Site site)
      : self(current_thread), group(*self->simdgroup), parity(group.generation & 1),
        generation(group.generation), values(reinterpret_cast<T*>(group.values[parity])) {
    values[self->lane] = value;
    meet_simdgroup(self, site);
  }

  LILY_UNTRACED T from(uint lane) const {
#ifdef LILY_CHECKED
    if (lane >= SIMD_WIDTH || !(group.participants[parity] >> lane & 1)) {
      lily_absent_lane(self, lane);
    }
#endif
    return values[lane % SIMD_WIDTH];
  }

  // True for the first thread that asks: it computes what all read.
  LILY_UNTRACED bool first() const {
    if (group.reduced[parity] == generation + 1) {
      return false;
    }
    group.reduced[parity] = generation + 1;
    return true;
  }

  T* result() const { return reinterpret_cast<T*>(group.result[parity]); }
};

// Combines all values in the order of a butterfly (lanes 1, 2, 4, 8, 16 apart).
template <typename T, typename F>
LILY_UNTRACED inline T reduce(T value, F combine, Site site) {
  const Exchange<T> e(value, site);
  if (e.first()) {
    T* v = e.values;
    const uint32_t lanes = e.group.participants[e.parity];
    if (lanes == 0xffffffffu) {
      for (unsigned width = SIMD_WIDTH / 2; width > 0; width /= 2) {
        for (unsigned i = 0; i < width; ++i) {
          v[i] = combine(v[2 * i], v[2 * i + 1]);
        }
      }
      *e.result() = v[0];
    } else {
      unsigned lane = unsigned(__builtin_ctz(lanes));
      T total = v[lane];
      while (++lane < SIMD_WIDTH) {
        if (lanes >> lane & 1) {
          total = combine(total, v[lane]);
        }
      }
      *e.result() = total;
    }
  }
  return *e.result();
}

// Prefixes in the order of the lanes; an exclusive one starts from `identity`.
template <typename T, typename F>
LILY_UNTRACED inline T scan(T value, F combine, T identity, bool inclusive, Site site) {
  const Exchange<T> e(value, site);
  if (e.first()) {
    T total = identity;
    for (unsigned lane = 0; lane < SIMD_WIDTH; ++lane) {
      if (e.group.participants[e.parity] >> lane & 1) {
        const T next = combine(total, e.values[lane]);
        e.result()[lane] = inclusive ? next : total;
        total = next;
      }
    }
  }
  return e.result()[e.self->lane];
}

// Combines the values of a quadgroup, four neighbouring lanes. All lanes of the simdgroup take part.
template <typename T, typename F>
LILY_UNTRACED inline T reduce_quad(T value, F combine, Site site) {
  const Exchange<T> e(value, site);
  const uint first = e.self->lane / 4 * 4;
  return combine(combine(e.from(first), e.from(first + 1)), combine(e.from(first + 2), e.from(first + 3)));
}

struct Add { template <typename T> T operator()(T a, T b) const { return T(a + b); } };
struct Multiply { template <typename T> T operator()(T a, T b) const { return T(a * b); } };
struct Minimum { template <typename T> T operator()(T a, T b) const { return metal::min(a, b); } };
struct Maximum { template <typename T> T operator()(T a, T b) const { return metal::max(a, b); } };
struct And { template <typename T> T operator()(T a, T b) const { return T(a & b); } };
struct Or { template <typename T> T operator()(T a, T b) const { return T(a | b); } };
struct Xor { template <typename T> T operator()(T a, T b) const { return T(a ^ b); } };

}  // namespace lily

namespace metal {

#define LILY_REDUCTION(NAME, F)                                                                             \
  template <typename T> inline T NAME(T value, LILY_SITE(#NAME)) { return lily::reduce(value, lily::F(), site); }
LILY_REDUCTION(simd_sum, Add)
LILY_REDUCTION(simd_product, Multiply)
LILY_REDUCTION(simd_min, Minimum)
LILY_REDUCTION(simd_max, Maximum)
LILY_REDUCTION(simd_and, And)
LILY_REDUCTION(simd_or, Or)
LILY_REDUCTION(simd_xor, Xor)
#undef LILY_REDUCTION

#define LILY_QUAD_REDUCTION(NAME, F)                                                                        \
  template <typename T> inline T NAME(T value, LILY_SITE(#NAME)) {                                          \
    return lily::reduce_quad(value, lily::F(), site);                                                       \
  }
LILY_QUAD_REDUCTION(quad_sum, Add)
LILY_QUAD_REDUCTION(quad_product, Multiply)
LILY_QUAD_REDUCTION(quad_min, Minimum)
LILY_QUAD_REDUCTION(quad_max, Maximum)
LILY_QUAD_REDUCTION(quad_and, And)
LILY_QUAD_REDUCTION(quad_or, Or)
LILY_QUAD_REDUCTION(quad_xor, Xor)
#undef LILY_QUAD_REDUCTION

#define LILY_SCAN(NAME, F, IDENTITY, INCLUSIVE)                                                             \
  template <typename T> inline T NAME(T value, LILY_SITE(#NAME)) {                                          \
    return lily::scan(value, lily::F(), T(IDENTITY), INCLUSIVE, site);                                      \
  }
LILY_SCAN(simd_prefix_inclusive_sum, Add, 0, true)
LILY_SCAN(simd_prefix_exclusive_sum, Add, 0, false)
LILY_SCAN(simd_prefix_inclusive_product, Multiply, 1, true)
LILY_SCAN(simd_prefix_exclusive_product, Multiply, 1, false)
#undef LILY_SCAN

template <typename T> LILY_UNTRACED inline T simd_shuffle(T value, ushort lane, LILY_SITE("simd_shuffle")) {
  return lily::Exchange<T>(value, site).from(lane);
}
template <typename T> LILY_UNTRACED inline T simd_shuffle_xor(T value, ushort mask, LILY_SITE("simd_shuffle_xor")) {
  const lily::Exchange<T> e(value, site);
  return e.from(e.self->lane ^ mask);
}
// Lanes without a source keep their own value.
template <typename T> LILY_UNTRACED inline T simd_shuffle_up(T value, ushort delta, LILY_SITE("simd_shuffle_up")) {
  const lily::Exchange<T> e(value, site);
  return e.self->lane >= delta ? e.from(e.self->lane - delta) : value;
}
template <typename T> LILY_UNTRACED inline T simd_shuffle_down(T value, ushort delta, LILY_SITE("simd_shuffle_down")) {
  const lily::Exchange<T> e(value, site);
  return e.self->lane + delta < lily::SIMD_WIDTH ? e.from(e.self->lane + delta) : value;
}
template <typename T>
LILY_UNTRACED inline T simd_shuffle_and_fill_up(T value, T fill, ushort delta, LILY_SITE("simd_shuffle_and_fill_up")) {
  const lily::Exchange<T> e(value, site);
  const lily::Exchange<T> f(fill, site);
  return e.self->lane >= delta ? e.from(e.self->lane - delta) : f.from(e.self->lane + lily::SIMD_WIDTH - delta);
}
template <typename T>
LILY_UNTRACED inline T simd_shuffle_and_fill_down(T value, T fill, ushort delta, LILY_SITE("simd_shuffle_and_fill_down")) {
  const lily::Exchange<T> e(value, site);
  const lily::Exchange<T> f(fill, site);
  const uint lane = e.self->lane + delta;
  return lane < lily::SIMD_WIDTH ? e.from(lane) : f.from(lane - lily::SIMD_WIDTH);
}
template <typename T> LILY_UNTRACED inline T simd_shuffle_rotate_up(T value, ushort delta, LILY_SITE("simd_shuffle_rotate_up")) {
  const lily::Exchange<T> e(value, site);
  return e.from((e.self->lane - delta) % lily::SIMD_WIDTH);
}
template <typename T> LILY_UNTRACED inline T simd_shuffle_rotate_down(T value, ushort delta, LILY_SITE("simd_shuffle_rotate_down")) {
  const lily::Exchange<T> e(value, site);
  return e.from((e.self->lane + delta) % lily::SIMD_WIDTH);
}
template <typename T> LILY_UNTRACED inline T simd_broadcast(T value, ushort lane, LILY_SITE("simd_broadcast")) {
  return lily::Exchange<T>(value, site).from(lane);
}
template <typename T> LILY_UNTRACED inline T simd_broadcast_first(T value, LILY_SITE("simd_broadcast_first")) {
  const lily::Exchange<T> e(value, site);
  return e.from(uint(__builtin_ctz(e.group.participants[e.parity])));
}
template <typename T> LILY_UNTRACED inline T quad_broadcast(T value, ushort lane, LILY_SITE("quad_broadcast")) {
  const lily::Exchange<T> e(value, site);
  return e.from(e.self->lane / 4 * 4 + lane);
}
template <typename T> LILY_UNTRACED inline T quad_shuffle_xor(T value, ushort mask, LILY_SITE("quad_shuffle_xor")) {
  const lily::Exchange<T> e(value, site);
  return e.from(e.self->lane ^ mask);
}
inline bool simd_all(bool value, LILY_SITE("simd_all")) { return lily::reduce(value, lily::And(), site); }
inline bool simd_any(bool value, LILY_SITE("simd_any")) { return lily::reduce(value, lily::Or(), site); }
LILY_UNTRACED inline bool simd_is_first() {
  return lily::current_thread->lane == uint(__builtin_ctz(lily::current_thread->simdgroup->lanes));
}

// The lanes whose value is true.
struct simd_vote {
  using vote_t = ulong;
  ulong lanes;
  explicit simd_vote(ulong lanes = 0) : lanes(lanes) {}
  explicit operator vote_t() const { return lanes; }
  bool any() const { return lanes != 0; }
  bool all() const { return lanes == 0xffffffffu; }
};
LILY_UNTRACED inline simd_vote simd_ballot(bool value, LILY_SITE("simd_ballot")) {
  const uint bit = value ? 1u << lily::current_thread->lane : 0u;
  return simd_vote(lily::reduce(bit, lily::Or(), site));
}
inline simd_vote simd_active_threads_mask(LILY_SITE("simd_active_threads_mask")) { return simd_ballot(true, site); }

}  // namespace metal
#endif
