// simdgroup_matrix: 8x8 matrices spread over the 32 lanes of a simdgroup.
#ifndef LILY_CPU_MATRIX
#define LILY_CPU_MATRIX
#include "simd.h"

// Lane l holds elements (row, column) and (row, column + 1). This is not Apple's layout, on purpose: a kernel
// that assumes one fails here.
#define LILY_FRAGMENT
inline int lily_fragment_row(uint lane) { return int(lane / 4); }
inline int lily_fragment_column(uint lane) { return int(lane % 4 * 2); }
// Apple's layout, for tests of the helpers.
inline int lily_apple_fragment_row(uint lane) { return int(((lane / 4) & 4) + ((lane / 2) % 4)); }
inline int lily_apple_fragment_column(uint lane) { return int(((lane / 4) & 2) * 2 + (lane % 2) * 2); }

namespace lily {
LILY_UNTRACED inline uint this_lane() { return current_thread->lane; }
LILY_UNTRACED inline void meet_here(Site site) { meet_simdgroup(current_thread, site); }
}

namespace metal {

template <typename T, int COLUMNS, int ROWS>
struct simdgroup_matrix {
  static_assert(COLUMNS == 8 && ROWS == 8, "Metal has 8x8 matrices only");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  LILY_UNTRACED explicit simdgroup_matrix(T diagonal) {
    const uint lane = lily::current_thread->lane;
    for (int i = 0; i < 2; ++i) {
      elements[i] = lily_fragment_row(lane) == lily_fragment_column(lane) + i ? diagonal : T(0.0f);
    }
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <typename T, int COLUMNS, int ROWS = COLUMNS, typename U = T>
inline simdgroup_matrix<T, COLUMNS, ROWS> make_filled_simdgroup_matrix(U value) {
  simdgroup_matrix<T, COLUMNS, ROWS> m;
  m.elements = vec<T, 2>(T(value), T(value));
  return m;
}

// In checked mode loads and stores meet too, so that one which not all lanes reach is reported.
#ifdef LILY_CHECKED
#define LILY_MEET lily::meet_here(site)
#else
#define LILY_MEET (void)site
#endif

template <typename T>
inline void simdgroup_load(
    simdgroup_matrix<T, 8, 8>& m, const T* source, ulong elements_per_row = 8, ulong2 origin = ulong2(0, 0),
    bool transpose = false, LILY_SITE("simdgroup_load")) {
  LILY_MEET;
  const uint lane = lily::this_lane();
  const ulong row = ulong(lily_fragment_row(lane)), column = ulong(lily_fragment_column(lane));
  const T* p = source + origin.y * elements_per_row + origin.x;
  if (transpose) {
    m.elements[0] = p[column * elements_per_row + row];
    m.elements[1] = p[(column + 1) * elements_per_row + row];
  } else {
    m.elements[0] = p[row * elements_per_row + column];
    m.elements[1] = p[row * elements_per_row + column + 1];
  }
}

template <typename T>
inline void simdgroup_store(
    simdgroup_matrix<T, 8, 8> m, T* target, ulong elements_per_row = 8, ulong2 origin = ulong2(0, 0),
    bool transpose = false, LILY_SITE("simdgroup_store")) {
  LILY_MEET;
  const uint lane = lily::this_lane();
  const ulong row = ulong(lily_fragment_row(lane)), column = ulong(lily_fragment_column(lane));
  T* p = target + origin.y * elements_per_row + origin.x;
  if (transpose) {
    p[column * elements_per_row + row] = m.elements[0];
    p[(column + 1) * elements_per_row + row] = m.elements[1];
  } else {
    p[row * elements_per_row + column] = m.elements[0];
    p[row * elements_per_row + column + 1] = m.elements[1];
  }
}
#undef LILY_MEET

// d = a b + c, in float.
template <typename D, typename A, typename B, typename C>
LILY_UNTRACED inline void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c, LILY_SITE("simdgroup_multiply_accumulate")) {
  lily::Thread* self = lily::current_thread;
  lily::Simdgroup& group = *self->simdgroup;
  const uint32_t generation = group.generation;
  const unsigned parity = generation & 1;
  float* left = reinterpret_cast<float*>(group.values[parity]);
  float* right = left + 64;
  float* start = reinterpret_cast<float*>(group.extra[parity]);
  const int at = lily_fragment_row(self->lane) * 8 + lily_fragment_column(self->lane);
  for (int i = 0; i < 2; ++i) {
    left[at + i] = float(a.elements[i]);
    right[at + i] = float(b.elements[i]);
    start[at + i] = float(c.elements[i]);
  }
  lily::meet_simdgroup(self, site);
  float* result = reinterpret_cast<float*>(group.result[parity]);
  if (group.reduced[parity] != generation + 1) {
    group.reduced[parity] = generation + 1;
    lily::lily_multiply_8x8(result, left, right, start);
  }
  d.elements = vec<D, 2>(D(result[at]), D(result[at + 1]));
}

template <typename D, typename A, typename B>
inline void simdgroup_multiply(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    LILY_SITE("simdgroup_multiply")) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f), site);
}

}  // namespace metal
#endif
