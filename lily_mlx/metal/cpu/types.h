// Scalar types of Metal that C++ lacks, and the type traits that kernels use.
#ifndef LILY_CPU_TYPES
#define LILY_CPU_TYPES
#include <stddef.h>
#include <stdint.h>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

// Metal aligns vectors to their size. MLX's CPU arrays are only aligned to 8 bytes, so a build without
// checks must read vectors from any address; the checked mode gives every array Metal's alignment.
#ifdef LILY_CHECKED
#define LILY_ALIGN(bytes) alignas(bytes)
#else
#define LILY_ALIGN(bytes)
#endif

#if defined(__has_builtin)
#define LILY_HAS_BIT_CAST __has_builtin(__builtin_bit_cast)
#else
#define LILY_HAS_BIT_CAST 0
#endif
#if LILY_HAS_BIT_CAST
#define LILY_CONSTEXPR constexpr
#else
#define LILY_CONSTEXPR
#endif

namespace metal {

template <typename T, T V>
struct integral_constant {
  static constexpr T value = V;
  constexpr operator T() const { return V; }
};
template <bool V> using bool_constant = integral_constant<bool, V>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <typename A, typename B> struct is_same : false_type {};
template <typename A> struct is_same<A, A> : true_type {};
template <typename A, typename B> constexpr bool is_same_v = is_same<A, B>::value;
template <bool C, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { using type = T; };
template <bool C, typename T = void> using enable_if_t = typename enable_if<C, T>::type;
template <bool C, typename A, typename B> struct conditional { using type = A; };
template <typename A, typename B> struct conditional<false, A, B> { using type = B; };
template <bool C, typename A, typename B> using conditional_t = typename conditional<C, A, B>::type;
template <typename T> struct remove_cv { using type = T; };
template <typename T> struct remove_cv<const T> { using type = T; };
template <typename T> struct remove_cv<volatile T> { using type = T; };
template <typename T> struct remove_cv<const volatile T> { using type = T; };
template <typename T> using remove_cv_t = typename remove_cv<T>::type;
template <typename T> struct remove_reference { using type = T; };
template <typename T> struct remove_reference<T&> { using type = T; };
template <typename T> struct remove_reference<T&&> { using type = T; };
template <typename T> using remove_reference_t = typename remove_reference<T>::type;
// Address spaces vanish here; of a constant, as in Metal, the const goes with them.
template <typename T> using remove_addrspace_t = remove_cv_t<T>;
template <typename T> T&& declval();
template <typename From, typename To>
struct is_convertible {
  template <typename F, typename T, typename = decltype(declval<void (&)(T)>()(declval<F>()))>
  static constexpr bool test(int) { return true; }
  template <typename F, typename T> static constexpr bool test(...) { return false; }
  static constexpr bool value = test<From, To>(0);
};
template <typename From, typename To> constexpr bool is_convertible_v = is_convertible<From, To>::value;
template <typename T> constexpr bool is_integral_v = __is_same(remove_cv_t<T>, bool) ||
    __is_same(remove_cv_t<T>, char) || __is_same(remove_cv_t<T>, signed char) ||
    __is_same(remove_cv_t<T>, unsigned char) || __is_same(remove_cv_t<T>, short) ||
    __is_same(remove_cv_t<T>, unsigned short) || __is_same(remove_cv_t<T>, int) ||
    __is_same(remove_cv_t<T>, unsigned int) || __is_same(remove_cv_t<T>, long) ||
    __is_same(remove_cv_t<T>, unsigned long) || __is_same(remove_cv_t<T>, long long) ||
    __is_same(remove_cv_t<T>, unsigned long long);
template <typename T> struct is_integral : integral_constant<bool, is_integral_v<T>> {};
template <typename T> constexpr bool is_unsigned_v = is_integral_v<T> && T(-1) > T(0);
template <typename T> struct is_unsigned : integral_constant<bool, is_unsigned_v<T>> {};
template <typename T> constexpr bool is_arithmetic_builtin =
    is_integral_v<T> || __is_same(remove_cv_t<T>, float) || __is_same(remove_cv_t<T>, double);

}  // namespace metal

namespace lily {

template <typename To, typename From>
inline To copy_bits(const From& from) {
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// Compilers that have the builtin can use 16-bit floats in constant expressions.
template <typename To, typename From>
inline LILY_CONSTEXPR To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
#if LILY_HAS_BIT_CAST
  if constexpr (__is_trivially_copyable(To) && __is_trivially_copyable(From)) {
    return __builtin_bit_cast(To, from);
  } else
#endif
  {
    return copy_bits<To>(from);
  }
}

inline LILY_CONSTEXPR float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    return bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // Scaling by 2^112 also makes subnormals right.
  const float value = bit_cast<float>(magnitude << 13) * 0x1p112f;
  return bit_cast<float>(sign | bit_cast<uint32_t>(value));
}

inline LILY_CONSTEXPR uint16_t float_to_half(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
  }
  if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
    return uint16_t(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {  // subnormal: let a float addition round it
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

inline LILY_CONSTEXPR float bfloat_to_float(uint16_t bits) {
  return bit_cast<float>(uint32_t(bits) << 16);
}

inline LILY_CONSTEXPR uint16_t float_to_bfloat(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if (__builtin_expect((bits & 0x7fffffffu) > 0x7f800000u, 0)) {
    return uint16_t((bits >> 16) | 0x40u);
  }
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace lily

// A 16-bit float. It turns into float by itself, as in Metal; the way back rounds to nearest even and is
// explicit, so that an expression of both types has one meaning. Two of one kind give that kind.
#define LILY_SMALL_FLOAT(NAME, OTHER, TO_FLOAT, FROM_FLOAT)                                                 \
  struct NAME {                                                                                             \
    uint16_t bits;                                                                                          \
    NAME() = default;                                                                                       \
    template <typename T, typename = metal::enable_if_t<metal::is_arithmetic_builtin<T> ||                  \
                                                        metal::is_same_v<T, OTHER>>>                        \
    LILY_CONSTEXPR explicit NAME(T value) : bits(lily::FROM_FLOAT(float(value))) {}                         \
    LILY_CONSTEXPR operator float() const { return lily::TO_FLOAT(bits); }                                  \
    template <typename T, typename = metal::enable_if_t<metal::is_arithmetic_builtin<T>>>                   \
    NAME& operator=(T value) { bits = lily::FROM_FLOAT(float(value)); return *this; }                       \
    NAME& operator+=(float value) { return *this = float(*this) + value; }                                  \
    NAME& operator-=(float value) { return *this = float(*this) - value; }                                  \
    NAME& operator*=(float value) { return *this = float(*this) * value; }                                  \
    NAME& operator/=(float value) { return *this = float(*this) / value; }                                  \
    LILY_CONSTEXPR NAME operator-() const { return lily::bit_cast<NAME>(uint16_t(bits ^ 0x8000u)); }        \
  };                                                                                                        \
  LILY_SMALL_FLOAT_OPERATOR(NAME, +)                                                                        \
  LILY_SMALL_FLOAT_OPERATOR(NAME, -)                                                                        \
  LILY_SMALL_FLOAT_OPERATOR(NAME, *)                                                                        \
  LILY_SMALL_FLOAT_OPERATOR(NAME, /)
// A template takes exact types only, so a float operand never becomes NAME.
#define LILY_SMALL_FLOAT_OPERATOR(NAME, OP)                                                                 \
  template <typename A, typename B,                                                                         \
      typename = metal::enable_if_t<metal::is_same_v<A, NAME> && metal::is_same_v<B, NAME>>>                \
  inline LILY_CONSTEXPR NAME operator OP(A a, B b) { return NAME(float(a) OP float(b)); }

struct half;
struct bfloat;
LILY_SMALL_FLOAT(half, bfloat, half_to_float, float_to_half)
LILY_SMALL_FLOAT(bfloat, half, bfloat_to_float, float_to_bfloat)
#undef LILY_SMALL_FLOAT
#undef LILY_SMALL_FLOAT_OPERATOR

typedef bfloat bfloat16_t;
typedef half float16_t;

// 1.5h
inline LILY_CONSTEXPR half operator""h(long double value) { return half(float(value)); }

template <typename To, typename From>
inline LILY_CONSTEXPR To as_type(const From& from) {
  return lily::bit_cast<To>(from);
}

namespace metal {
using ::as_type;
using ::bfloat;
using ::half;
using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;
template <typename T> constexpr bool is_floating_point_v =
    is_same_v<remove_cv_t<T>, float> || is_same_v<remove_cv_t<T>, half> || is_same_v<remove_cv_t<T>, bfloat>;
template <typename T> struct is_floating_point : integral_constant<bool, is_floating_point_v<T>> {};
template <typename T> constexpr bool is_signed_v =
    is_floating_point_v<T> || (is_integral_v<T> && !is_unsigned_v<T>);
template <typename T> struct is_signed : integral_constant<bool, is_signed_v<T>> {};
template <typename T> constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <typename T> struct is_arithmetic : integral_constant<bool, is_arithmetic_v<T>> {};

template <typename T, size_t N>
struct array {
  T elements[N];
  constexpr T& operator[](size_t i) { return elements[i]; }
  constexpr const T& operator[](size_t i) const { return elements[i]; }
  static constexpr size_t size() { return N; }
};
}  // namespace metal
#endif
