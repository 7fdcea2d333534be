// Argmax with ties to the lower index. Needs nothing before it.

// Keeps the better of (best, best_index) and (value, index). NaN counts as -infinity.
inline void take_better(thread float& best, thread uint& best_index, float value, uint index) {
  if (metal::isnan(value)) {
    value = -INFINITY;
  }
  if (value > best || (value == best && index < best_index)) {
    best = value;
    best_index = index;
  }
}

// The best of a simdgroup, in all of its lanes.
inline void simd_best(thread float& best, thread uint& best_index) {
  float largest = simd_max(best);
  best_index = simd_min(best == largest ? best_index : 0xffffffffu);
  best = largest;
}
