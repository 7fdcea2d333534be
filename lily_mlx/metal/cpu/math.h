// Metal's math, integer and relational functions.
#ifndef LILY_CPU_MATH
#define LILY_CPU_MATH
#include "vectors.h"

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX 65504.0f
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (2u * __INT_MAX__ + 1u)
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.318309886183790671538f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_SQRT2_F 1.41421356237309504880f

namespace metal {

// Functions of float that also take vectors of it. half and bfloat turn into float.
#define LILY_UNARY(NAME, EXPRESSION)                                                                        \
  inline float NAME(float x) { return EXPRESSION; }                                                         \
  template <int N> inline vec<float, N> NAME(vec<float, N> v) { LILY_MAP1(NAME, v) }
#define LILY_BINARY(NAME, EXPRESSION)                                                                       \
  inline float NAME(float x, float y) { return EXPRESSION; }                                                \
  template <int N> inline vec<float, N> NAME(vec<float, N> v, vec<float, N> u) { LILY_MAP2(NAME, v, u) }
#define LILY_TRANSCENDENTAL                                                                                 \
  LILY_UNARY(exp, __builtin_expf(x))                                                                        \
  LILY_UNARY(exp2, __builtin_exp2f(x))                                                                      \
  LILY_UNARY(exp10, __builtin_powf(10.0f, x))                                                               \
  LILY_UNARY(log, __builtin_logf(x))                                                                        \
  LILY_UNARY(log2, __builtin_log2f(x))                                                                      \
  LILY_UNARY(log10, __builtin_log10f(x))                                                                    \
  LILY_UNARY(sqrt, __builtin_sqrtf(x))                                                                      \
  LILY_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))                                                              \
  LILY_UNARY(sin, __builtin_sinf(x))                                                                        \
  LILY_UNARY(cos, __builtin_cosf(x))                                                                        \
  LILY_UNARY(tan, __builtin_tanf(x))                                                                        \
  LILY_UNARY(asin, __builtin_asinf(x))                                                                      \
  LILY_UNARY(acos, __builtin_acosf(x))                                                                      \
  LILY_UNARY(atan, __builtin_atanf(x))                                                                      \
  LILY_UNARY(sinh, __builtin_sinhf(x))                                                                      \
  LILY_UNARY(cosh, __builtin_coshf(x))                                                                      \
  LILY_UNARY(tanh, __builtin_tanhf(x))                                                                      \
  LILY_UNARY(asinh, __builtin_asinhf(x))                                                                    \
  LILY_UNARY(acosh, __builtin_acoshf(x))                                                                    \
  LILY_UNARY(atanh, __builtin_atanhf(x))                                                                    \
  LILY_UNARY(ceil, __builtin_ceilf(x))                                                                      \
  LILY_UNARY(floor, __builtin_floorf(x))                                                                    \
  LILY_UNARY(trunc, __builtin_truncf(x))                                                                    \
  LILY_UNARY(round, __builtin_roundf(x))                                                                    \
  LILY_UNARY(rint, __builtin_rintf(x))                                                                      \
  LILY_UNARY(fabs, __builtin_fabsf(x))                                                                      \
  LILY_UNARY(fract, x - __builtin_floorf(x))                                                                \
  LILY_BINARY(pow, __builtin_powf(x, y))                                                                    \
  LILY_BINARY(powr, __builtin_powf(x, y))                                                                   \
  LILY_BINARY(atan2, __builtin_atan2f(x, y))                                                                \
  LILY_BINARY(fmod, __builtin_fmodf(x, y))                                                                  \
  LILY_BINARY(fmax, __builtin_fmaxf(x, y))                                                                  \
  LILY_BINARY(fmin, __builtin_fminf(x, y))                                                                  \
  LILY_BINARY(copysign, __builtin_copysignf(x, y))                                                          \
  LILY_BINARY(fdim, __builtin_fdimf(x, y))                                                                  \
  LILY_BINARY(divide, x / y)

LILY_TRANSCENDENTAL
// On the CPU all three variants are the precise one.
namespace precise { LILY_TRANSCENDENTAL }
namespace fast { LILY_TRANSCENDENTAL }

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <int N> inline vec<float, N> fma(vec<float, N> a, vec<float, N> b, vec<float, N> c) {
  LILY_MAP3(fma, a, b, c)
}
inline float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
inline float saturate(float x) { return __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f); }
inline float sign(float x) { return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : (x == 0.0f ? x : 0.0f)); }
inline float mix(float a, float b, float t) { return a + (b - a) * t; }
inline float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
inline float smoothstep(float a, float b, float x) {
  const float t = saturate((x - a) / (b - a));
  return t * t * (3.0f - 2.0f * t);
}
inline float degrees(float x) { return x * (180.0f / M_PI_F); }
inline float radians(float x) { return x * (M_PI_F / 180.0f); }
template <int N> inline vec<float, N> mix(vec<float, N> a, vec<float, N> b, vec<float, N> t) {
  return a + (b - a) * t;
}
template <int N> inline vec<float, N> saturate(vec<float, N> v) { LILY_MAP1(saturate, v) }
template <int N> inline vec<float, N> sign(vec<float, N> v) { LILY_MAP1(sign, v) }

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isnormal(float x) { return __builtin_isnormal(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
template <int N> inline vec<bool, N> isnan(vec<float, N> v) { LILY_MAP1(isnan, v) }
template <int N> inline vec<bool, N> isinf(vec<float, N> v) { LILY_MAP1(isinf, v) }
template <int N> inline vec<bool, N> isfinite(vec<float, N> v) { LILY_MAP1(isfinite, v) }

// min, max, clamp, abs and select: one overload for each type, so that mixed types are ambiguous, as in Metal.
#define LILY_ORDERED(T, MIN, MAX)                                                                           \
  inline T min(T a, T b) { return MIN; }                                                                    \
  inline T max(T a, T b) { return MAX; }                                                                    \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
#define LILY_INTEGER(T) LILY_ORDERED(T, b < a ? b : a, a < b ? b : a)
LILY_INTEGER(char)
LILY_INTEGER(signed char)
LILY_INTEGER(uchar)
LILY_INTEGER(short)
LILY_INTEGER(ushort)
LILY_INTEGER(int)
LILY_INTEGER(uint)
LILY_INTEGER(long)
LILY_INTEGER(ulong)
LILY_ORDERED(float, __builtin_fminf(a, b), __builtin_fmaxf(a, b))
LILY_ORDERED(half, half(__builtin_fminf(a, b)), half(__builtin_fmaxf(a, b)))
LILY_ORDERED(bfloat, bfloat(__builtin_fminf(a, b)), bfloat(__builtin_fmaxf(a, b)))
template <typename T, int N> inline vec<T, N> min(vec<T, N> a, vec<T, N> b) { LILY_MAP2(min, a, b) }
template <typename T, int N> inline vec<T, N> max(vec<T, N> a, vec<T, N> b) { LILY_MAP2(max, a, b) }
template <typename T, int N> inline vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) {
  return min(max(x, low), high);
}
template <typename T, int N> inline vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return min(max(x, vec<T, N>(low)), vec<T, N>(high));
}
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline short abs(short x) { return short(x < 0 ? -x : x); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline half abs(half x) { return as_type<half>(ushort(x.bits & 0x7fffu)); }
inline bfloat abs(bfloat x) { return as_type<bfloat>(ushort(x.bits & 0x7fffu)); }
template <typename T, int N> inline vec<T, N> abs(vec<T, N> v) { LILY_MAP1(abs, v) }

template <typename T> inline T select(T a, T b, bool second) { return second ? b : a; }
template <typename T, int N> inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  for (int i = 0; i < N; ++i) {
    a[i] = c[i] ? b[i] : a[i];
  }
  return a;
}

template <typename T, int N> inline T dot(vec<T, N> a, vec<T, N> b) {
  if constexpr (N == 2) {
    return T(a.x * b.x + a.y * b.y);
  } else if constexpr (N == 3) {
    return T(a.x * b.x + a.y * b.y + a.z * b.z);
  } else {
    return T(a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w);
  }
}
template <int N> inline float length(vec<float, N> v) { return sqrt(dot(v, v)); }
template <int N> inline float length_squared(vec<float, N> v) { return dot(v, v); }
template <int N> inline vec<float, N> normalize(vec<float, N> v) { return v * rsqrt(dot(v, v)); }

// Bits. clz and ctz of zero give the width of the type.
inline int popcount(int x) { return __builtin_popcount(uint(x)); }
inline uint popcount(uint x) { return uint(__builtin_popcount(x)); }
inline ulong popcount(ulong x) { return ulong(__builtin_popcountl(x)); }
inline ushort popcount(ushort x) { return ushort(__builtin_popcount(x)); }
inline uchar popcount(uchar x) { return uchar(__builtin_popcount(x)); }
inline uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32u; }
inline int clz(int x) { return int(clz(uint(x))); }
inline ulong clz(ulong x) { return x ? ulong(__builtin_clzl(x)) : 64ul; }
inline ushort clz(ushort x) { return ushort(clz(uint(x)) - 16u); }
inline uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32u; }
inline int ctz(int x) { return int(ctz(uint(x))); }
inline ulong ctz(ulong x) { return x ? ulong(__builtin_ctzl(x)) : 64ul; }
inline ushort ctz(ushort x) { return x ? ushort(__builtin_ctz(x)) : ushort(16); }
inline uint reverse_bits(uint x) {
  x = ((x >> 1) & 0x55555555u) | ((x & 0x55555555u) << 1);
  x = ((x >> 2) & 0x33333333u) | ((x & 0x33333333u) << 2);
  x = ((x >> 4) & 0x0f0f0f0fu) | ((x & 0x0f0f0f0fu) << 4);
  return __builtin_bswap32(x);
}
inline uint rotate(uint x, uint n) { return (x << (n & 31u)) | (x >> ((32u - n) & 31u)); }
inline uint extract_bits(uint x, uint offset, uint bits) {
  return bits >= 32u ? x >> offset : (x >> offset) & ((1u << bits) - 1u);
}
inline int extract_bits(int x, uint offset, uint bits) {
  return bits == 0u ? 0 : int(uint(x) << (32u - offset - bits)) >> (32u - bits);
}
inline uint insert_bits(uint base, uint insert, uint offset, uint bits) {
  const uint mask = (bits >= 32u ? ~0u : (1u << bits) - 1u) << offset;
  return (base & ~mask) | ((insert << offset) & mask);
}
inline uint mulhi(uint a, uint b) { return uint((ulong(a) * ulong(b)) >> 32); }
inline int mulhi(int a, int b) { return int((long(a) * long(b)) >> 32); }
inline ulong mulhi(ulong a, ulong b) { return ulong(((unsigned __int128)a * b) >> 64); }
inline uint absdiff(uint a, uint b) { return a > b ? a - b : b - a; }
inline uint absdiff(int a, int b) { return a > b ? uint(a) - uint(b) : uint(b) - uint(a); }
inline uint mad24(uint a, uint b, uint c) { return (a & 0xffffffu) * (b & 0xffffffu) + c; }
inline int mul24(int a, int b) { return int(uint(a << 8 >> 8) * uint(b << 8 >> 8)); }

template <typename T> struct numeric_limits;
#define LILY_LIMITS(T, LOWEST, MAX)                                                                         \
  template <> struct numeric_limits<T> {                                                                    \
    static constexpr T lowest() { return T(LOWEST); }                                                       \
    static constexpr T min() { return T(LOWEST); }                                                          \
    static constexpr T max() { return T(MAX); }                                                             \
    static constexpr T infinity() { return T(0); }                                                          \
  };
LILY_LIMITS(char, -128, 127)
LILY_LIMITS(int8_t, -128, 127)
LILY_LIMITS(uchar, 0, 255)
LILY_LIMITS(short, -32768, 32767)
LILY_LIMITS(ushort, 0, 65535)
LILY_LIMITS(int, INT_MIN, INT_MAX)
LILY_LIMITS(uint, 0u, UINT_MAX)
LILY_LIMITS(long, -__LONG_MAX__ - 1, __LONG_MAX__)
LILY_LIMITS(ulong, 0ul, 2ul * __LONG_MAX__ + 1ul)
#define LILY_FLOAT_LIMITS(T, CONSTEXPR, MIN, MAX, EPSILON)                                                  \
  template <> struct numeric_limits<T> {                                                                    \
    static CONSTEXPR T lowest() { return -T(MAX); }                                                         \
    static CONSTEXPR T min() { return T(MIN); }                                                             \
    static CONSTEXPR T max() { return T(MAX); }                                                             \
    static CONSTEXPR T epsilon() { return T(EPSILON); }                                                     \
    static CONSTEXPR T infinity() { return T(INFINITY); }                                                   \
    static CONSTEXPR T quiet_NaN() { return T(NAN); }                                                       \
  };
LILY_FLOAT_LIMITS(float, constexpr, FLT_MIN, FLT_MAX, FLT_EPSILON)
LILY_FLOAT_LIMITS(half, LILY_CONSTEXPR, 0x1p-14f, HALF_MAX, 0x1p-10f)
LILY_FLOAT_LIMITS(bfloat, LILY_CONSTEXPR, FLT_MIN, 0x1.fep127f, 0x1p-7f)
#undef LILY_UNARY
#undef LILY_BINARY
#undef LILY_TRANSCENDENTAL
#undef LILY_ORDERED
#undef LILY_INTEGER
#undef LILY_LIMITS
#undef LILY_FLOAT_LIMITS
#undef LILY_MAP1
#undef LILY_MAP2
#undef LILY_MAP3

}  // namespace metal
#endif
