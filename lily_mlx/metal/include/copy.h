// Copies from device to threadgroup memory that may go on while the threads do something else. A backend with
// asynchronous copies defines LILY_NATIVE_COPY and supplies the same functions; here a copy is done when it is called.
//
// Copies begun before one call of end_group() are a group. After finish_groups<PENDING>() only the PENDING newest groups
// of this thread may be unfinished; a threadgroup_barrier then shows the finished ones to the other threads.
#if !defined(LILY_COPY) && !defined(LILY_NATIVE_COPY)
#define LILY_COPY

// 16 bytes, or zeros where not `valid`.
inline void begin_copy(threadgroup uint4* to, const device uint4* from, bool valid) {
  uint4 value = uint4(0u, 0u, 0u, 0u);
  if (valid) {
    value = *from;
  }
  *to = value;
}

inline void end_group() {}

template <int PENDING>
inline void finish_groups() {}
#endif
