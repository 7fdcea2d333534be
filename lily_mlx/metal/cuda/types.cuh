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

namespace conversion {  // kernels may have functions of these names

// Rounding to nearest even, by one instruction at run time and by arithmetic in constant expressions.
__forceinline__ ushort bfloat_bits_at_run_time(float value) {
  ushort bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__forceinline__ constexpr ushort bfloat_bits(float value) {
  if (!__builtin_is_constant_evaluated()) return bfloat_bits_at_run_time(value);
  const uint bits = as_type<uint>(value);
  return value != value ? ushort((bits >> 16) | 0x40u) : ushort((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
__forceinline__ ushort half_bits_at_run_time(float value) {
  ushort bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__forceinline__ constexpr ushort half_bits(float value) {
  if (!__builtin_is_constant_evaluated()) return half_bits_at_run_time(value);
  const uint sign = as_type<uint>(value) >> 16 & 0x8000u, magnitude = as_type<uint>(value) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return ushort(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return ushort(sign | 0x7c00u);  // rounds to 65536 or more
  if (magnitude < 0x38800000u) return ushort(sign | (as_type<uint>(as_type<float>(magnitude) + 0.5f) - 0x3f000000u));
  return ushort(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}
__forceinline__ float half_value_at_run_time(ushort bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__forceinline__ constexpr float half_value(ushort bits) {
  if (!__builtin_is_constant_evaluated()) return half_value_at_run_time(bits);
  const uint sign = uint(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return as_type<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  return as_type<float>(sign | as_type<uint>(as_type<float>(magnitude << 13) * 5.192296858534828e+33f));  // 2^112
}

__forceinline__ constexpr float bfloat_value(ushort bits) { return as_type<float>(uint(bits) << 16); }

}  // namespace conversion

namespace metal {

template <class A, class B> constexpr bool is_same_v = false;
template <class A> constexpr bool is_same_v<A, A> = true;
template <bool C, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool C, class T = void> using enable_if_t = typename enable_if<C, T>::type;
template <class T> struct remove_cv { using type = T; };
template <class T> struct remove_cv<const T> { using type = T; };
template <class T> struct remove_cv<volatile T> { using type = T; };
template <class T> struct remove_cv<const volatile T> { using type = T; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T, class... Ts> constexpr bool is_one_of_v = (is_same_v<remove_cv_t<T>, Ts> || ...);
template <class T> constexpr bool is_integral_v =
    is_one_of_v<T, bool, char, signed char, uchar, short, ushort, int, uint, long, ulong, long long, unsigned long long>;
template <class T> constexpr bool is_arithmetic_builtin = is_integral_v<T> || is_one_of_v<T, float, double>;

}  // namespace metal

// A 16-bit float. It turns into float by itself, as in Metal; the way back is explicit, so that an expression
// of both types has one meaning. Two of one kind give that kind.
#define LILY_SMALL_FLOAT(NAME, OTHER)                                                                          \
  struct alignas(2) NAME {                                                                                     \
    ushort bits;                                                                                               \
    NAME() = default;                                                                                          \
    template <class T, class = metal::enable_if_t<metal::is_arithmetic_builtin<T> || metal::is_same_v<T, OTHER>>> \
    __forceinline__ constexpr explicit NAME(T value) : bits(conversion::NAME##_bits(float(value))) {}          \
    __forceinline__ constexpr operator float() const { return conversion::NAME##_value(bits); }                \
    template <class T, class = metal::enable_if_t<metal::is_arithmetic_builtin<T>>>                            \
    __forceinline__ NAME& operator=(T value) { return *this = NAME(value); }                                   \
    __forceinline__ NAME& operator+=(float value) { return *this = NAME(float(*this) + value); }               \
    __forceinline__ NAME& operator-=(float value) { return *this = NAME(float(*this) - value); }               \
    __forceinline__ NAME& operator*=(float value) { return *this = NAME(float(*this) * value); }               \
    __forceinline__ NAME& operator/=(float value) { return *this = NAME(float(*this) / value); }               \
    __forceinline__ constexpr NAME operator-() const { return NAME(-float(*this)); }                           \
  };                                                                                                           \
  LILY_SMALL_FLOAT_OPERATOR(NAME, +)                                                                           \
  LILY_SMALL_FLOAT_OPERATOR(NAME, -)                                                                           \
  LILY_SMALL_FLOAT_OPERATOR(NAME, *)                                                                           \
  LILY_SMALL_FLOAT_OPERATOR(NAME, /)
// A template takes exact types only, so a float operand never becomes NAME.
#define LILY_SMALL_FLOAT_OPERATOR(NAME, OP)                                                                    \
  template <class A, class B, class = metal::enable_if_t<metal::is_same_v<A, NAME> && metal::is_same_v<B, NAME>>> \
  __forceinline__ constexpr NAME operator OP(A a, B b) { return NAME(float(a) OP float(b)); }

struct half;
struct bfloat;
LILY_SMALL_FLOAT(half, bfloat)
LILY_SMALL_FLOAT(bfloat, half)
#undef LILY_SMALL_FLOAT
#undef LILY_SMALL_FLOAT_OPERATOR

using bfloat16_t = bfloat;
using float16_t = half;

// 1.5h
__forceinline__ constexpr half operator""h(long double value) { return half(float(value)); }

namespace metal {

template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
  __forceinline__ constexpr operator T() const { return V; }
};
template <bool V> using bool_constant = integral_constant<bool, V>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <class A, class B> struct is_same : bool_constant<is_same_v<A, B>> {};
template <bool C, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool C, class A, class B> using conditional_t = typename conditional<C, A, B>::type;
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T&> { using type = T; };
template <class T> struct remove_reference<T&&> { using type = T; };
template <class T> using remove_reference_t = typename remove_reference<T>::type;
// Address spaces vanish here; of a constant, as in Metal, the const goes with them.
template <class T> using remove_addrspace_t = remove_cv_t<T>;
template <class T> struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T> constexpr bool is_unsigned_v = is_integral_v<T> && T(-1) > T(0);
template <class T> struct is_unsigned : bool_constant<is_unsigned_v<T>> {};
template <class T> constexpr bool is_floating_point_v = is_one_of_v<T, float, half, bfloat>;
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T> constexpr bool is_signed_v = is_floating_point_v<T> || (is_integral_v<T> && !is_unsigned_v<T>);
template <class T> struct is_signed : bool_constant<is_signed_v<T>> {};
template <class T> constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T> struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <class From, class To> struct is_convertible : bool_constant<__is_convertible_to(From, To)> {};
template <class From, class To> constexpr bool is_convertible_v = is_convertible<From, To>::value;

template <class T, size_t N>
struct array {
  T elements[N];
  __forceinline__ constexpr T& operator[](size_t i) { return elements[i]; }
  __forceinline__ constexpr const T& operator[](size_t i) const { return elements[i]; }
  static __forceinline__ constexpr size_t size() { return N; }
};

}  // namespace metal

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
