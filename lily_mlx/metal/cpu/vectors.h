// Metal's vector types with 2, 3 and 4 components.
#ifndef LILY_CPU_VECTORS
#define LILY_CPU_VECTORS
#include "types.h"

namespace metal {

template <typename T, int N> struct vec;

}  // namespace metal

namespace lily {

// Some components of a vector as a vector: v.xy, v.zw, v.xyz. V is the type they form.
template <typename V, typename T, int SIZE, int A, int B, int C = -1>
struct Swizzle {
  T data[SIZE];
  operator V() const {
    if constexpr (C < 0) {
      return V(data[A], data[B]);
    } else {
      return V(data[A], data[B], data[C]);
    }
  }
  Swizzle& operator=(V v) {
    data[A] = v[0];
    data[B] = v[1];
    if constexpr (C >= 0) {
      data[C] = v[2];
    }
    return *this;
  }
  Swizzle& operator=(const Swizzle& other) { return *this = V(other); }
  Swizzle& operator+=(V v) { return *this = V(*this) + v; }
  Swizzle& operator*=(V v) { return *this = V(*this) * v; }
};

}  // namespace lily

namespace metal {

#define LILY_VECTOR_OPERATOR(N, OP)                                                                         \
  friend inline vec operator OP(vec a, vec b) { LILY_APPLY##N(OP) }                          \
  vec& operator OP##=(vec b) { return *this = *this OP b; }
#define LILY_APPLY2(OP) return vec(T(a.x OP b.x), T(a.y OP b.y));
#define LILY_APPLY3(OP) return vec(T(a.x OP b.x), T(a.y OP b.y), T(a.z OP b.z));
#define LILY_APPLY4(OP) return vec(T(a.x OP b.x), T(a.y OP b.y), T(a.z OP b.z), T(a.w OP b.w));
#define LILY_VECTOR_COMPARE(N, OP)                                                                          \
  friend inline vec<bool, N> operator OP(vec a, vec b) { LILY_TEST##N(OP) }
#define LILY_TEST2(OP) return vec<bool, 2>(a.x OP b.x, a.y OP b.y);
#define LILY_TEST3(OP) return vec<bool, 3>(a.x OP b.x, a.y OP b.y, a.z OP b.z);
#define LILY_TEST4(OP) return vec<bool, 4>(a.x OP b.x, a.y OP b.y, a.z OP b.z, a.w OP b.w);
#define LILY_VECTOR_COMMON(N)                                                                               \
  using component = T;                                                                                      \
  static constexpr int components = N;                                                                      \
  vec() = default;                                                                                          \
  vec(const vec&) = default;                                                                                \
  vec& operator=(const vec& v) {                                                                            \
    struct LILY_ALIGN(alignof(vec)) Raw { T values[sizeof(vec) / sizeof(T)]; };                             \
    reinterpret_cast<Raw&>(*this) = reinterpret_cast<const Raw&>(v);                                        \
    return *this;                                                                                           \
  }                                                                                                         \
  T& operator[](int i) { return data[i]; }                                                                  \
  const T& operator[](int i) const { return data[i]; }                                                      \
  LILY_VECTOR_OPERATOR(N, +)                                                                                \
  LILY_VECTOR_OPERATOR(N, -)                                                                                \
  LILY_VECTOR_OPERATOR(N, *)                                                                                \
  LILY_VECTOR_OPERATOR(N, /)                                                                                \
  LILY_VECTOR_OPERATOR(N, %)                                                                                \
  LILY_VECTOR_OPERATOR(N, &)                                                                                \
  LILY_VECTOR_OPERATOR(N, |)                                                                                \
  LILY_VECTOR_OPERATOR(N, ^)                                                                                \
  LILY_VECTOR_OPERATOR(N, <<)                                                                               \
  LILY_VECTOR_OPERATOR(N, >>)                                                                               \
  LILY_VECTOR_COMPARE(N, ==)                                                                                \
  LILY_VECTOR_COMPARE(N, !=)                                                                                \
  LILY_VECTOR_COMPARE(N, <)                                                                                 \
  LILY_VECTOR_COMPARE(N, >)                                                                                 \
  LILY_VECTOR_COMPARE(N, <=)                                                                                \
  LILY_VECTOR_COMPARE(N, >=)                                                                                \
  friend inline vec operator-(vec a) { return vec(T(0)) - a; }

template <typename T>
struct LILY_ALIGN(2 * sizeof(T)) vec<T, 2> {
  union {
    struct { T x, y; };
    struct { T r, g; };
    T data[2];
    lily::Swizzle<vec<T, 2>, T, 2, 0, 1> xy;
    lily::Swizzle<vec<T, 2>, T, 2, 1, 0> yx;
  };
  LILY_VECTOR_COMMON(2)
  vec(T s) : data{s, s} {}
  vec(T a, T b) : data{a, b} {}
  template <typename U> explicit vec(vec<U, 2> v) : data{T(v.x), T(v.y)} {}
  friend inline vec operator~(vec a) { return vec(T(~a.x), T(~a.y)); }
};

template <typename T>
struct LILY_ALIGN(4 * sizeof(T)) vec<T, 3> {
  union {
    struct { T x, y, z; };
    struct { T r, g, b; };
    T data[4];  // Metal's three-component vectors are as large as those of four
    lily::Swizzle<vec<T, 2>, T, 4, 0, 1> xy;
    lily::Swizzle<vec<T, 2>, T, 4, 1, 2> yz;
    lily::Swizzle<vec<T, 2>, T, 4, 0, 2> xz;
    lily::Swizzle<vec<T, 3>, T, 4, 0, 1, 2> xyz;
  };
  LILY_VECTOR_COMMON(3)
  vec(T s) : data{s, s, s, T(0)} {}
  vec(T a, T b, T c) : data{a, b, c, T(0)} {}
  vec(vec<T, 2> a, T b) : data{a.x, a.y, b, T(0)} {}
  vec(T a, vec<T, 2> b) : data{a, b.x, b.y, T(0)} {}
  template <typename U> explicit vec(vec<U, 3> v) : data{T(v.x), T(v.y), T(v.z), T(0)} {}
  friend inline vec operator~(vec a) { return vec(T(~a.x), T(~a.y), T(~a.z)); }
};

template <typename T>
struct LILY_ALIGN(4 * sizeof(T)) vec<T, 4> {
  union {
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    T data[4];
    lily::Swizzle<vec<T, 2>, T, 4, 0, 1> xy;
    lily::Swizzle<vec<T, 2>, T, 4, 2, 3> zw;
    lily::Swizzle<vec<T, 2>, T, 4, 1, 2> yz;
    lily::Swizzle<vec<T, 2>, T, 4, 0, 2> xz;
    lily::Swizzle<vec<T, 2>, T, 4, 1, 3> yw;
    lily::Swizzle<vec<T, 2>, T, 4, 0, 1> lo;
    lily::Swizzle<vec<T, 2>, T, 4, 2, 3> hi;
    lily::Swizzle<vec<T, 3>, T, 4, 0, 1, 2> xyz;
    lily::Swizzle<vec<T, 3>, T, 4, 1, 2, 3> yzw;
  };
  LILY_VECTOR_COMMON(4)
  vec(T s) : data{s, s, s, s} {}
  vec(T a, T b, T c, T d) : data{a, b, c, d} {}
  vec(vec<T, 2> a, vec<T, 2> b) : data{a.x, a.y, b.x, b.y} {}
  vec(vec<T, 2> a, T b, T c) : data{a.x, a.y, b, c} {}
  vec(T a, T b, vec<T, 2> c) : data{a, b, c.x, c.y} {}
  vec(T a, vec<T, 2> b, T c) : data{a, b.x, b.y, c} {}
  vec(vec<T, 3> a, T b) : data{a.x, a.y, a.z, b} {}
  vec(T a, vec<T, 3> b) : data{a, b.x, b.y, b.z} {}
  template <typename U> explicit vec(vec<U, 4> v) : data{T(v.x), T(v.y), T(v.z), T(v.w)} {}
  friend inline vec operator~(vec a) { return vec(T(~a.x), T(~a.y), T(~a.z), T(~a.w)); }
};
#undef LILY_VECTOR_COMMON
#undef LILY_VECTOR_COMPARE
#undef LILY_VECTOR_OPERATOR
#undef LILY_APPLY2
#undef LILY_APPLY3
#undef LILY_APPLY4
#undef LILY_TEST2
#undef LILY_TEST3
#undef LILY_TEST4

// Unaligned vectors with no padding.
template <typename T, int N>
struct packed_vec {
  T data[N];
  packed_vec() = default;
  packed_vec(vec<T, N> v) {
    for (int i = 0; i < N; ++i) {
      data[i] = v[i];
    }
  }
  operator vec<T, N>() const {
    vec<T, N> v(data[0]);
    for (int i = 1; i < N; ++i) {
      v[i] = data[i];
    }
    return v;
  }
  T& operator[](int i) { return data[i]; }
  const T& operator[](int i) const { return data[i]; }
};

#define LILY_VECTOR_NAMES(NAME, T)                                                                          \
  using NAME##2 = vec<T, 2>;                                                                                \
  using NAME##3 = vec<T, 3>;                                                                                \
  using NAME##4 = vec<T, 4>;                                                                                \
  using packed_##NAME##2 = packed_vec<T, 2>;                                                                \
  using packed_##NAME##3 = packed_vec<T, 3>;                                                                \
  using packed_##NAME##4 = packed_vec<T, 4>;
LILY_VECTOR_NAMES(float, float)
LILY_VECTOR_NAMES(half, half)
LILY_VECTOR_NAMES(bfloat, bfloat)
LILY_VECTOR_NAMES(int, int)
LILY_VECTOR_NAMES(uint, uint)
LILY_VECTOR_NAMES(short, short)
LILY_VECTOR_NAMES(ushort, ushort)
LILY_VECTOR_NAMES(char, int8_t)
LILY_VECTOR_NAMES(uchar, uchar)
LILY_VECTOR_NAMES(long, long)
LILY_VECTOR_NAMES(ulong, ulong)
LILY_VECTOR_NAMES(bool, bool)
#undef LILY_VECTOR_NAMES

// Applies a function of one component to all, with one argument vector for each parameter.
#define LILY_MAP1(F, a)                                                                                     \
  if constexpr (N == 2) { return {F(a.x), F(a.y)}; }                                                        \
  else if constexpr (N == 3) { return {F(a.x), F(a.y), F(a.z)}; }                                           \
  else { return {F(a.x), F(a.y), F(a.z), F(a.w)}; }
#define LILY_MAP2(F, a, b)                                                                                  \
  if constexpr (N == 2) { return {F(a.x, b.x), F(a.y, b.y)}; }                                              \
  else if constexpr (N == 3) { return {F(a.x, b.x), F(a.y, b.y), F(a.z, b.z)}; }                            \
  else { return {F(a.x, b.x), F(a.y, b.y), F(a.z, b.z), F(a.w, b.w)}; }
#define LILY_MAP3(F, a, b, c)                                                                               \
  if constexpr (N == 2) { return {F(a.x, b.x, c.x), F(a.y, b.y, c.y)}; }                                    \
  else if constexpr (N == 3) { return {F(a.x, b.x, c.x), F(a.y, b.y, c.y), F(a.z, b.z, c.z)}; }             \
  else { return {F(a.x, b.x, c.x), F(a.y, b.y, c.y), F(a.z, b.z, c.z), F(a.w, b.w, c.w)}; }

template <int N>
inline bool all(vec<bool, N> v) {
  bool result = v[0];
  for (int i = 1; i < N; ++i) {
    result = result && v[i];
  }
  return result;
}
template <int N>
inline bool any(vec<bool, N> v) {
  bool result = v[0];
  for (int i = 1; i < N; ++i) {
    result = result || v[i];
  }
  return result;
}
inline bool all(bool v) { return v; }
inline bool any(bool v) { return v; }

}  // namespace metal

template <typename To, typename V, typename T, int SIZE, int A, int B, int C>
inline To as_type(const lily::Swizzle<V, T, SIZE, A, B, C>& from) {
  return lily::bit_cast<To>(V(from));
}
#endif
