// Metal's keywords, types and type traits as declarations for the front end (C++ for OpenCL).
//
// Address spaces are real: `device`, `constant`, `threadgroup` and `thread` are OpenCL's four, which never
// convert into one another. Nothing here is ever run.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define threadgroup __local
#define thread __private
// `constant` is OpenCL's own keyword for __constant.

#define METAL_FUNC inline
#define __METAL__ 1
#ifndef __METAL_VERSION__ // 400 for a text with Metal 4's tensor operations
#define __METAL_VERSION__ 320
#endif

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef __bf16 bfloat;

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF INFINITY
#define MAXFLOAT 0x1.fffffep+127f
#define M_PI_F 3.14159274f
#define M_PI_2_F 1.57079637f
#define M_LOG2E_F 1.44269502f
#define M_LN2_F 0.693147182f
#define M_LN10_F 2.30258509f

namespace metal {

// ---- vectors: native ones, so that swizzles, indexing and arithmetic are the compiler's -----------------

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define LILY_VECTORS(type)      \
  typedef vec<type, 2> type##2; \
  typedef vec<type, 3> type##3; \
  typedef vec<type, 4> type##4;

LILY_VECTORS(char)
LILY_VECTORS(uchar)
LILY_VECTORS(short)
LILY_VECTORS(ushort)
LILY_VECTORS(int)
LILY_VECTORS(uint)
LILY_VECTORS(long)
LILY_VECTORS(ulong)
LILY_VECTORS(half)
LILY_VECTORS(bfloat)
LILY_VECTORS(float)
#undef LILY_VECTORS
// C++ for OpenCL has no vectors of bool.
typedef char2 bool2;
typedef char3 bool3;
typedef char4 bool4;

// What `float4(...)` means: one scalar for all, one value for each component, another vector converted, or
// shorter vectors and scalars put together. The front end turns a vector's constructor into this function.
template <typename T>
struct lily_components {
  static constant constexpr int count = 1;
};
template <typename T, int N>
struct lily_components<T __attribute__((ext_vector_type(N)))> {
  static constant constexpr int count = N;
};

template <typename T, int N, typename A>
constexpr vec<T, N> lily_vector(A value) {
  static_assert(
      lily_components<A>::count == 1 || lily_components<A>::count == N, "a vector of another length is converted");
  if constexpr (lily_components<A>::count == 1) {
    return (vec<T, N>)(T(value));
  } else {
    return __builtin_convertvector(value, vec<T, N>);
  }
}

template <typename T, int N, typename A, typename B, typename... Rest>
constexpr vec<T, N> lily_vector(A first, B second, Rest... rest) {
  constexpr int given = lily_components<A>::count + lily_components<B>::count + (0 + ... + lily_components<Rest>::count);
  static_assert(given == N, "a vector is built from another number of components");
  if constexpr (sizeof...(Rest) + 2 == N) {
    return vec<T, N>{T(first), T(second), T(rest)...};
  } else {
    return vec<T, N>{};
  }
}

template <typename T, int N>
constexpr vec<T, N> lily_vector() {
  return vec<T, N>{};
}

// ---- type traits --------------------------------------------------------------------------------------

template <typename T, T V>
struct integral_constant {
  static constant constexpr T value = V;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return V; }
};
template <bool V>
using bool_constant = integral_constant<bool, V>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <bool C, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool C, typename T = void>
using enable_if_t = typename enable_if<C, T>::type;

template <bool C, typename T, typename F>
struct conditional {
  typedef T type;
};
template <typename T, typename F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool C, typename T, typename F>
using conditional_t = typename conditional<C, T, F>::type;

template <typename T>
struct remove_cv {
  typedef T type;
};
template <typename T>
struct remove_cv<const T> {
  typedef T type;
};
template <typename T>
struct remove_cv<volatile T> {
  typedef T type;
};
template <typename T>
struct remove_cv<const volatile T> {
  typedef T type;
};
template <typename T>
using remove_cv_t = typename remove_cv<T>::type;

template <typename T>
struct remove_reference {
  typedef T type;
};
template <typename T>
struct remove_reference<T&> {
  typedef T type;
};
template <typename T>
using remove_reference_t = typename remove_reference<T>::type;

template <typename T>
struct remove_addrspace {
  typedef T type;
};
#define LILY_REMOVE(space)            \
  template <typename T>               \
  struct remove_addrspace<space T> {  \
    typedef T type;                   \
  };
LILY_REMOVE(device)
LILY_REMOVE(threadgroup)
LILY_REMOVE(thread)
LILY_REMOVE(constant)
#undef LILY_REMOVE
template <typename T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

template <typename A, typename B>
constant constexpr bool is_same_v = __is_same(A, B);
template <typename A, typename B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <typename A, typename B>
constant constexpr bool is_convertible_v = __is_convertible_to(A, B);
template <typename A, typename B>
struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};
template <typename T>
constant constexpr bool is_integral_v = __is_integral(T);
template <typename T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <typename T>
constant constexpr bool is_floating_point_v = __is_floating_point(T);
template <typename T>
struct is_floating_point : bool_constant<__is_floating_point(T)> {};
template <typename T>
constant constexpr bool is_arithmetic_v = __is_arithmetic(T);
template <typename T>
struct is_arithmetic : bool_constant<__is_arithmetic(T)> {};
template <typename T>
constant constexpr bool is_signed_v = __is_signed(T);
template <typename T>
constant constexpr bool is_unsigned_v = __is_unsigned(T);

template <typename... T>
struct _disjunction : false_type {};
template <typename T, typename... Rest>
struct _disjunction<T, Rest...> : bool_constant<T::value || _disjunction<Rest...>::value> {};

template <typename To, typename From>
constexpr To lily_as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type changes the size");
  return __builtin_bit_cast(To, value);
}

// ---- limits -------------------------------------------------------------------------------------------

template <typename T>
struct numeric_limits;

#define LILY_LIMITS(type, least, most, is_int)                     \
  template <>                                                      \
  struct numeric_limits<type> {                                    \
    static constant constexpr bool is_integer = is_int;            \
    static constexpr type min() { return type(least); }            \
    static constexpr type max() { return type(most); }             \
    static constexpr type lowest() { return is_int ? type(least) : type(-(most)); } \
    static constexpr type infinity() { return type(is_int ? 0 : INFINITY); } \
    static constexpr type quiet_NaN() { return type(is_int ? 0 : NAN); } \
    static constexpr type epsilon() { return type(is_int ? 0 : 1.0e-7f); } \
  };

LILY_LIMITS(bool, 0, 1, true)
LILY_LIMITS(char, -128, 127, true)
LILY_LIMITS(int8_t, -128, 127, true)
LILY_LIMITS(uint8_t, 0, 255, true)
LILY_LIMITS(int16_t, -32768, 32767, true)
LILY_LIMITS(uint16_t, 0, 65535, true)
LILY_LIMITS(int32_t, -2147483647 - 1, 2147483647, true)
LILY_LIMITS(uint32_t, 0u, 4294967295u, true)
LILY_LIMITS(int64_t, -9223372036854775807L - 1, 9223372036854775807L, true)
LILY_LIMITS(uint64_t, 0ul, 18446744073709551615ul, true)
LILY_LIMITS(half, 6.1035e-05f, 65504.0f, false)
LILY_LIMITS(bfloat, 1.1754944e-38f, 3.3895314e+38f, false)
LILY_LIMITS(float, 1.17549435e-38f, 3.40282347e+38f, false)
#undef LILY_LIMITS

// ---- small class types --------------------------------------------------------------------------------

template <typename T, size_t N>
struct array {
  T elements[N];
  constexpr thread T& operator[](size_t i) thread { return elements[i]; }
  constexpr const thread T& operator[](size_t i) const thread { return elements[i]; }
  constexpr size_t size() const thread { return N; }
};

// A value that is the same for all threads.
template <typename T>
using uniform = T;
template <typename T>
constexpr T make_uniform(T value) {
  return value;
}

struct os_log {
  constexpr os_log(const constant char*, const constant char*) constant {}
  template <typename... A>
  void log_debug(const constant char*, A...) const constant {}
  template <typename... A>
  void log_debug(const constant char*, A...) const thread {}
};

} // namespace metal

using namespace metal;

#define as_type lily_as_type
