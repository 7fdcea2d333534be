// Sums and maxima over a threadgroup of at most 32 simdgroups.
//
// Every thread of the threadgroup must call, and every thread gets the result. `scratch` holds one float
// per simdgroup; it may be reused for the next call.
#ifndef LILY_REDUCE
#define LILY_REDUCE

template <int SIMDGROUPS>
inline float threadgroup_sum(float value, threadgroup float* scratch, uint simdgroup, uint lane) {
  value = simd_sum(value);
  if (SIMDGROUPS == 1) {
    return value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup); // the last call's readers are done
  if (lane == 0) {
    scratch[simdgroup] = value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (int i = 0; i < SIMDGROUPS; ++i) {
    total += scratch[i];
  }
  return total;
}

template <int SIMDGROUPS>
inline float threadgroup_max(float value, threadgroup float* scratch, uint simdgroup, uint lane) {
  value = simd_max(value);
  if (SIMDGROUPS == 1) {
    return value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    scratch[simdgroup] = value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float largest = scratch[0];
  for (int i = 1; i < SIMDGROUPS; ++i) {
    largest = metal::max(largest, scratch[i]);
  }
  return largest;
}
#endif
