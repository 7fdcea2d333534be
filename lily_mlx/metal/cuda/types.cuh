// Metal's scalar and vector types. Everything stands in the namespace `lily`, where these names hide
// CUDA's own types of the same names. NVRTC treats functions without an annotation as device functions
// (MLX passes --device-as-default-execution-space).
#undef inf
#undef INFINITY
#undef NAN
#undef MAXFLOAT
#define INFINITY __builtin_bit_cast(float, 0x7f800000u)
#define NAN __builtin_bit_cast(float, 0x7fc00000u)
#define MAXFLOAT 3.402823466e+38f
#define M_PI_F 3.14159265358979323846f

namespace lily {

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using size_t = unsigned long;
using ptrdiff_t = long;

template <class To, class From>
__forceinline__ constexpr To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs two types of one size");
  return __builtin_bit_cast(To, value);
}

// A float with 8 bits of significand. Converts to float by itself, as in Metal; arithmetic is float's.
struct alignas(2) bfloat {
  ushort bits;
  bfloat() = default;
  __forceinline__ bfloat(float value) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  }
  __forceinline__ operator float() const { return as_type<float>(uint(bits) << 16); }
  __forceinline__ bfloat& operator+=(float value) { return *this = bfloat(float(*this) + value); }
  __forceinline__ bfloat& operator-=(float value) { return *this = bfloat(float(*this) - value); }
  __forceinline__ bfloat& operator*=(float value) { return *this = bfloat(float(*this) * value); }
  __forceinline__ bfloat& operator/=(float value) { return *this = bfloat(float(*this) / value); }
};

struct alignas(2) half {
  ushort bits;
  half() = default;
  __forceinline__ half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  __forceinline__ operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  __forceinline__ half& operator+=(float value) { return *this = half(float(*this) + value); }
  __forceinline__ half& operator-=(float value) { return *this = half(float(*this) - value); }
  __forceinline__ half& operator*=(float value) { return *this = half(float(*this) * value); }
  __forceinline__ half& operator/=(float value) { return *this = half(float(*this) / value); }
};

using bfloat16_t = bfloat;
using float16_t = half;

template <class T>
struct identity {
  using type = T;
};
template <class T>
using identity_t = typename identity<T>::type;

// The vectors have the sizes and alignments of Metal's, so that a 16-byte one is one load or store.
template <class T, int N>
struct vec;

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  __forceinline__ constexpr vec(T s) : x(s), y(s) {}
  __forceinline__ constexpr vec(T a, T b) : x(a), y(b) {}
  template <class U>
  __forceinline__ explicit constexpr vec(vec<U, 2> v) : x(T(v.x)), y(T(v.y)) {}
  __forceinline__ T& operator[](int i) { return (&x)[i]; }
  __forceinline__ const T& operator[](int i) const { return (&x)[i]; }
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  __forceinline__ constexpr vec(T s) : x(s), y(s), z(s) {}
  __forceinline__ constexpr vec(T a, T b, T c) : x(a), y(b), z(c) {}
  __forceinline__ constexpr vec(vec<T, 2> v, T c) : x(v.x), y(v.y), z(c) {}
  template <class U>
  __forceinline__ explicit constexpr vec(vec<U, 3> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
  __forceinline__ T& operator[](int i) { return (&x)[i]; }
  __forceinline__ const T& operator[](int i) const { return (&x)[i]; }
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  __forceinline__ constexpr vec(T s) : x(s), y(s), z(s), w(s) {}
  __forceinline__ constexpr vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  __forceinline__ constexpr vec(vec<T, 2> v, vec<T, 2> u) : x(v.x), y(v.y), z(u.x), w(u.y) {}
  __forceinline__ constexpr vec(vec<T, 2> v, T c, T d) : x(v.x), y(v.y), z(c), w(d) {}
  __forceinline__ constexpr vec(vec<T, 3> v, T d) : x(v.x), y(v.y), z(v.z), w(d) {}
  template <class U>
  __forceinline__ explicit constexpr vec(vec<U, 4> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
  __forceinline__ T& operator[](int i) { return (&x)[i]; }
  __forceinline__ const T& operator[](int i) const { return (&x)[i]; }
};

// An operator for vectors, and for a vector and a scalar on either side.
#define LILY_VECTOR_OPERATOR(OP, RESULT)                                        \
  template <class T, int N>                                                     \
  __forceinline__ vec<RESULT, N> operator OP(vec<T, N> a, vec<T, N> b) {        \
    vec<RESULT, N> result;                                                      \
    _Pragma("unroll") for (int i = 0; i < N; ++i) result[i] = a[i] OP b[i];     \
    return result;                                                              \
  }                                                                             \
  template <class T, int N>                                                     \
  __forceinline__ vec<RESULT, N> operator OP(vec<T, N> a, identity_t<T> b) {    \
    return a OP vec<T, N>(b);                                                   \
  }                                                                             \
  template <class T, int N>                                                     \
  __forceinline__ vec<RESULT, N> operator OP(identity_t<T> a, vec<T, N> b) {    \
    return vec<T, N>(a) OP b;                                                   \
  }
#define LILY_VECTOR_ASSIGNMENT(OP)                                              \
  template <class T, int N>                                                     \
  __forceinline__ vec<T, N>& operator OP##=(vec<T, N>& a, vec<T, N> b) {        \
    return a = a OP b;                                                          \
  }                                                                             \
  template <class T, int N>                                                     \
  __forceinline__ vec<T, N>& operator OP##=(vec<T, N>& a, identity_t<T> b) {    \
    return a = a OP b;                                                          \
  }

LILY_VECTOR_OPERATOR(+, T)
LILY_VECTOR_OPERATOR(-, T)
LILY_VECTOR_OPERATOR(*, T)
LILY_VECTOR_OPERATOR(/, T)
LILY_VECTOR_OPERATOR(%, T)
LILY_VECTOR_OPERATOR(&, T)
LILY_VECTOR_OPERATOR(|, T)
LILY_VECTOR_OPERATOR(^, T)
LILY_VECTOR_OPERATOR(<<, T)
LILY_VECTOR_OPERATOR(>>, T)
LILY_VECTOR_OPERATOR(<, bool)
LILY_VECTOR_OPERATOR(>, bool)
LILY_VECTOR_OPERATOR(<=, bool)
LILY_VECTOR_OPERATOR(>=, bool)
LILY_VECTOR_OPERATOR(==, bool)
LILY_VECTOR_OPERATOR(!=, bool)
LILY_VECTOR_OPERATOR(&&, bool)
LILY_VECTOR_OPERATOR(||, bool)
LILY_VECTOR_ASSIGNMENT(+)
LILY_VECTOR_ASSIGNMENT(-)
LILY_VECTOR_ASSIGNMENT(*)
LILY_VECTOR_ASSIGNMENT(/)
LILY_VECTOR_ASSIGNMENT(%)
LILY_VECTOR_ASSIGNMENT(&)
LILY_VECTOR_ASSIGNMENT(|)
LILY_VECTOR_ASSIGNMENT(^)
LILY_VECTOR_ASSIGNMENT(<<)
LILY_VECTOR_ASSIGNMENT(>>)

template <class T, int N>
__forceinline__ vec<T, N> operator-(vec<T, N> a) {
  vec<T, N> result;
  _Pragma("unroll") for (int i = 0; i < N; ++i) result[i] = -a[i];
  return result;
}
template <class T, int N>
__forceinline__ vec<T, N> operator~(vec<T, N> a) {
  vec<T, N> result;
  _Pragma("unroll") for (int i = 0; i < N; ++i) result[i] = ~a[i];
  return result;
}

#define LILY_VECTOR_NAMES(T)  \
  using T##2 = vec<T, 2>;     \
  using T##3 = vec<T, 3>;     \
  using T##4 = vec<T, 4>;
LILY_VECTOR_NAMES(float)
LILY_VECTOR_NAMES(half)
LILY_VECTOR_NAMES(bfloat)
LILY_VECTOR_NAMES(bool)
LILY_VECTOR_NAMES(char)
LILY_VECTOR_NAMES(uchar)
LILY_VECTOR_NAMES(short)
LILY_VECTOR_NAMES(ushort)
LILY_VECTOR_NAMES(int)
LILY_VECTOR_NAMES(uint)
LILY_VECTOR_NAMES(long)
LILY_VECTOR_NAMES(ulong)

}  // namespace lily
