// Metal's math, integer and relational functions as declarations: overloads for float, half and integers,
// none for bfloat, as in Metal (a bfloat argument converts to float).
#pragma once

namespace metal {

#define LILY_EACH_FLOAT(M) M(float) M(float2) M(float3) M(float4) M(half) M(half2) M(half3) M(half4)
#define LILY_EACH_INTEGER(M)                                                                                \
  M(char) M(char2) M(char3) M(char4) M(int8_t) M(uchar) M(uchar2) M(uchar3) M(uchar4) M(short) M(short2)    \
  M(short3) M(short4) M(ushort) M(ushort2) M(ushort3) M(ushort4) M(int) M(int2) M(int3) M(int4) M(uint)     \
  M(uint2) M(uint3) M(uint4) M(long) M(long2) M(long3) M(long4) M(ulong) M(ulong2) M(ulong3) M(ulong4)

#define LILY_UNARY(T)                                                                                       \
  T acos(T); T acosh(T); T asin(T); T asinh(T); T atan(T); T atanh(T); T ceil(T); T cos(T); T cosh(T);      \
  T cospi(T); T exp(T); T exp10(T); T exp2(T); T fabs(T); T floor(T); T fract(T); T log(T); T log10(T);     \
  T log2(T); T rint(T); T round(T); T rsqrt(T); T sign(T); T sin(T); T sinh(T); T sinpi(T); T sqrt(T);      \
  T tan(T); T tanh(T); T tanpi(T); T trunc(T); T abs(T); T saturate(T);
#define LILY_BINARY(T)                                                                                      \
  T atan2(T, T); T copysign(T, T); T fdim(T, T); T fmax(T, T); T fmin(T, T); T fmod(T, T); T pow(T, T);     \
  T powr(T, T); T max(T, T); T min(T, T); T step(T, T);
#define LILY_TERNARY(T) T fma(T, T, T); T mix(T, T, T); T clamp(T, T, T); T smoothstep(T, T, T);
#define LILY_MATH(T) LILY_UNARY(T) LILY_BINARY(T) LILY_TERNARY(T)

LILY_EACH_FLOAT(LILY_MATH)

float sincos(float, thread float&);
float frexp(float, thread int&);
float ldexp(float, int);
float modf(float, thread float&);

// The two precisions exist for float only.
namespace fast {
LILY_MATH(float)
LILY_MATH(float2)
LILY_MATH(float3)
LILY_MATH(float4)
} // namespace fast

namespace precise {
LILY_MATH(float)
LILY_MATH(float2)
LILY_MATH(float3)
LILY_MATH(float4)
} // namespace precise

#define LILY_INTEGER(T)                                                                                     \
  T max(T, T); T min(T, T); T clamp(T, T, T); T clz(T); T ctz(T); T popcount(T); T reverse_bits(T);         \
  T rotate(T, T); T mulhi(T, T); T addsat(T, T); T subsat(T, T); T absdiff(T, T); T hadd(T, T);             \
  T extract_bits(T, uint, uint); T insert_bits(T, T, uint, uint);
#define LILY_ABS(T) T abs(T);

LILY_EACH_INTEGER(LILY_INTEGER)
LILY_EACH_INTEGER(LILY_ABS)

#define LILY_RELATIONAL(T, B) B isnan(T); B isinf(T); B isfinite(T); B isnormal(T); B signbit(T);
LILY_RELATIONAL(float, bool)
LILY_RELATIONAL(half, bool)
LILY_RELATIONAL(bfloat, bool)
LILY_RELATIONAL(float2, bool2)
LILY_RELATIONAL(float3, bool3)
LILY_RELATIONAL(float4, bool4)

template <typename T>
T select(T when_false, T when_true, bool condition);
template <typename T, typename B, int N>
vec<T, N> select(vec<T, N> when_false, vec<T, N> when_true, vec<B, N> condition);
template <typename B, int N>
bool any(vec<B, N>);
template <typename B, int N>
bool all(vec<B, N>);

#define LILY_GEOMETRIC(S, T) S dot(T, T); S length(T); S distance(T, T); T normalize(T);
LILY_GEOMETRIC(float, float2)
LILY_GEOMETRIC(float, float3)
LILY_GEOMETRIC(float, float4)
LILY_GEOMETRIC(half, half2)
LILY_GEOMETRIC(half, half3)
LILY_GEOMETRIC(half, half4)
float3 cross(float3, float3);

#undef LILY_EACH_FLOAT
#undef LILY_EACH_INTEGER
#undef LILY_UNARY
#undef LILY_BINARY
#undef LILY_TERNARY
#undef LILY_MATH
#undef LILY_INTEGER
#undef LILY_ABS
#undef LILY_RELATIONAL
#undef LILY_GEOMETRIC

} // namespace metal
