// Metal's math functions (namespaces metal, metal::precise, metal::fast).
namespace lily {
namespace metal {

using lily::as_type;
using lily::bfloat;
using lily::half;
using lily::vec;

// (word & mask) | bits, which the compiler leaves as two instructions.
__forceinline__ unsigned int mask_or(unsigned int word, unsigned int mask, unsigned int bits) {
  unsigned int result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
}
#define LILY_MASK_OR(word, mask, bits) metal::mask_or(word, mask, bits)

// A function of one float: plain and precise are CUDA's accurate form, fast is the hardware's.
#define LILY_MATH1(NAME, ACCURATE, FAST)                                                    \
  __forceinline__ float NAME(float x) { return ACCURATE; }                                  \
  template <int N>                                                                          \
  __forceinline__ vec<float, N> NAME(vec<float, N> v) {                                     \
    _Pragma("unroll") for (int i = 0; i < N; ++i) v[i] = NAME(v[i]);                        \
    return v;                                                                               \
  }                                                                                         \
  namespace precise {                                                                       \
  __forceinline__ float NAME(float x) { return ACCURATE; }                                  \
  template <int N>                                                                          \
  __forceinline__ vec<float, N> NAME(vec<float, N> v) { return metal::NAME(v); }            \
  }                                                                                         \
  namespace fast {                                                                          \
  __forceinline__ float NAME(float x) { return FAST; }                                      \
  template <int N>                                                                          \
  __forceinline__ vec<float, N> NAME(vec<float, N> v) {                                     \
    _Pragma("unroll") for (int i = 0; i < N; ++i) v[i] = fast::NAME(v[i]);                  \
    return v;                                                                               \
  }                                                                                         \
  }

namespace hardware {
__forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__forceinline__ float rsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__forceinline__ float sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__forceinline__ float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
}  // namespace hardware

LILY_MATH1(exp, ::expf(x), ::__expf(x))
LILY_MATH1(exp2, ::exp2f(x), hardware::exp2(x))
LILY_MATH1(exp10, ::exp10f(x), ::__exp10f(x))
LILY_MATH1(log, ::logf(x), ::__logf(x))
LILY_MATH1(log2, ::log2f(x), ::__log2f(x))
LILY_MATH1(log10, ::log10f(x), ::__log10f(x))
LILY_MATH1(sqrt, ::sqrtf(x), hardware::sqrt(x))
LILY_MATH1(rsqrt, ::rsqrtf(x), hardware::rsqrt(x))
LILY_MATH1(sin, ::sinf(x), ::__sinf(x))
LILY_MATH1(cos, ::cosf(x), ::__cosf(x))
LILY_MATH1(tan, ::tanf(x), ::__tanf(x))
LILY_MATH1(tanh, ::tanhf(x), hardware::tanh(x))
LILY_MATH1(sinh, ::sinhf(x), ::sinhf(x))
LILY_MATH1(cosh, ::coshf(x), ::coshf(x))
LILY_MATH1(asin, ::asinf(x), ::asinf(x))
LILY_MATH1(acos, ::acosf(x), ::acosf(x))
LILY_MATH1(atan, ::atanf(x), ::atanf(x))
LILY_MATH1(floor, ::floorf(x), ::floorf(x))
LILY_MATH1(ceil, ::ceilf(x), ::ceilf(x))
LILY_MATH1(rint, ::rintf(x), ::rintf(x))
LILY_MATH1(round, ::roundf(x), ::roundf(x))
LILY_MATH1(trunc, ::truncf(x), ::truncf(x))
LILY_MATH1(fabs, ::fabsf(x), ::fabsf(x))
LILY_MATH1(saturate, ::__saturatef(x), ::__saturatef(x))
LILY_MATH1(fract, (x - ::floorf(x)), (x - ::floorf(x)))
LILY_MATH1(sign, (x > 0 ? 1.0f : (x < 0 ? -1.0f : 0.0f)), (x > 0 ? 1.0f : (x < 0 ? -1.0f : 0.0f)))

#define LILY_MATH2(NAME, ACCURATE, FAST)                                         \
  __forceinline__ float NAME(float x, float y) { return ACCURATE; }              \
  namespace precise {                                                            \
  __forceinline__ float NAME(float x, float y) { return ACCURATE; }              \
  }                                                                              \
  namespace fast {                                                               \
  __forceinline__ float NAME(float x, float y) { return FAST; }                  \
  }
LILY_MATH2(pow, ::powf(x, y), ::__powf(x, y))
LILY_MATH2(powr, ::powf(x, y), ::__powf(x, y))
LILY_MATH2(fmod, ::fmodf(x, y), ::fmodf(x, y))
LILY_MATH2(atan2, ::atan2f(x, y), ::atan2f(x, y))
LILY_MATH2(copysign, ::copysignf(x, y), ::copysignf(x, y))
LILY_MATH2(fmin, ::fminf(x, y), ::fminf(x, y))
LILY_MATH2(fmax, ::fmaxf(x, y), ::fmaxf(x, y))
LILY_MATH2(divide, (x / y), ::__fdividef(x, y))

__forceinline__ float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
template <int N>
__forceinline__ vec<float, N> fma(vec<float, N> a, vec<float, N> b, vec<float, N> c) {
  _Pragma("unroll") for (int i = 0; i < N; ++i) c[i] = ::fmaf(a[i], b[i], c[i]);
  return c;
}
__forceinline__ float mix(float a, float b, float t) { return a + (b - a) * t; }
__forceinline__ float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
__forceinline__ float ldexp(float x, int n) { return ::ldexpf(x, n); }
__forceinline__ bool isnan(float x) { return x != x; }
__forceinline__ bool isinf(float x) { return ::fabsf(x) == INFINITY; }
__forceinline__ bool isfinite(float x) { return ::fabsf(x) < INFINITY; }
__forceinline__ bool signbit(float x) { return as_type<int>(x) < 0; }

// One overload for each arithmetic type: mixed arguments are ambiguous, as in Metal.
__forceinline__ float min(float a, float b) { return ::fminf(a, b); }
__forceinline__ float max(float a, float b) { return ::fmaxf(a, b); }
__forceinline__ float abs(float a) { return ::fabsf(a); }
#define LILY_MIN_MAX(T)                                                 \
  __forceinline__ constexpr T min(T a, T b) { return b < a ? b : a; }   \
  __forceinline__ constexpr T max(T a, T b) { return a < b ? b : a; }
LILY_MIN_MAX(char)
LILY_MIN_MAX(uchar)
LILY_MIN_MAX(short)
LILY_MIN_MAX(ushort)
LILY_MIN_MAX(int)
LILY_MIN_MAX(uint)
LILY_MIN_MAX(long)
LILY_MIN_MAX(ulong)
__forceinline__ constexpr int abs(int a) { return a < 0 ? -a : a; }
__forceinline__ constexpr long abs(long a) { return a < 0 ? -a : a; }
__forceinline__ constexpr short abs(short a) { return short(a < 0 ? -a : a); }
template <class T, int N>
__forceinline__ vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  _Pragma("unroll") for (int i = 0; i < N; ++i) a[i] = min(a[i], b[i]);
  return a;
}
template <class T, int N>
__forceinline__ vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  _Pragma("unroll") for (int i = 0; i < N; ++i) a[i] = max(a[i], b[i]);
  return a;
}
template <class T, int N>
__forceinline__ vec<T, N> abs(vec<T, N> a) {
  _Pragma("unroll") for (int i = 0; i < N; ++i) a[i] = abs(a[i]);
  return a;
}
__forceinline__ float min3(float a, float b, float c) { return min(min(a, b), c); }
__forceinline__ float max3(float a, float b, float c) { return max(max(a, b), c); }
template <class T>
__forceinline__ constexpr T clamp(T x, identity_t<T> low, identity_t<T> high) {
  return min(max(x, low), high);
}

template <class T>
__forceinline__ T select(T a, T b, bool choose_b) { return choose_b ? b : a; }
template <class T, int N>
__forceinline__ vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> choose_b) {
  _Pragma("unroll") for (int i = 0; i < N; ++i) a[i] = choose_b[i] ? b[i] : a[i];
  return a;
}
template <int N>
__forceinline__ bool any(vec<bool, N> v) {
  bool result = false;
  _Pragma("unroll") for (int i = 0; i < N; ++i) result = result || v[i];
  return result;
}
template <int N>
__forceinline__ bool all(vec<bool, N> v) {
  bool result = true;
  _Pragma("unroll") for (int i = 0; i < N; ++i) result = result && v[i];
  return result;
}
template <class T, int N>
__forceinline__ T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  _Pragma("unroll") for (int i = 1; i < N; ++i) sum = a[i] * b[i] + sum;
  return sum;
}
template <int N>
__forceinline__ float length_squared(vec<float, N> a) { return dot(a, a); }
template <int N>
__forceinline__ float length(vec<float, N> a) { return sqrt(dot(a, a)); }

__forceinline__ uint popcount(uint x) { return uint(::__popc(x)); }
__forceinline__ int popcount(int x) { return ::__popc(uint(x)); }
__forceinline__ ulong popcount(ulong x) { return ulong(::__popcll(x)); }
__forceinline__ uint clz(uint x) { return uint(::__clz(int(x))); }
__forceinline__ int clz(int x) { return ::__clz(x); }
__forceinline__ uint ctz(uint x) { return x ? uint(::__ffs(int(x)) - 1) : 32u; }
__forceinline__ int ctz(int x) { return x ? ::__ffs(x) - 1 : 32; }
__forceinline__ uint reverse_bits(uint x) { return ::__brev(x); }
__forceinline__ uint rotate(uint x, uint n) { return ::__funnelshift_l(x, x, n); }
__forceinline__ uint mulhi(uint a, uint b) { return ::__umulhi(a, b); }
__forceinline__ int mulhi(int a, int b) { return ::__mulhi(a, b); }
__forceinline__ uint extract_bits(uint x, uint offset, uint bits) {
  return bits == 0 ? 0u : (x >> offset) & (0xffffffffu >> (32u - bits));
}

template <class T>
struct numeric_limits;
#define LILY_LIMITS(T, LOWEST, MAX)                                    \
  template <>                                                          \
  struct numeric_limits<T> {                                           \
    static __forceinline__ constexpr T min() { return T(LOWEST); }     \
    static __forceinline__ constexpr T lowest() { return T(LOWEST); }  \
    static __forceinline__ constexpr T max() { return T(MAX); }        \
    static __forceinline__ constexpr T infinity() { return T(0); }     \
  };
LILY_LIMITS(char, -128, 127)
LILY_LIMITS(int8_t, -128, 127)
LILY_LIMITS(uchar, 0, 255)
LILY_LIMITS(short, -32768, 32767)
LILY_LIMITS(ushort, 0, 65535)
LILY_LIMITS(int, (-2147483647 - 1), 2147483647)
LILY_LIMITS(uint, 0u, 4294967295u)
LILY_LIMITS(long, (-9223372036854775807 - 1), 9223372036854775807)
LILY_LIMITS(ulong, 0ul, 18446744073709551615ul)
#undef LILY_LIMITS
#define LILY_FLOAT_LIMITS(T, MIN, MAX, EPSILON)                             \
  template <>                                                               \
  struct numeric_limits<T> {                                                \
    static __forceinline__ constexpr T min() { return T(MIN); }             \
    static __forceinline__ constexpr T lowest() { return T(-MAX); }         \
    static __forceinline__ constexpr T max() { return T(MAX); }             \
    static __forceinline__ constexpr T epsilon() { return T(EPSILON); }     \
    static __forceinline__ constexpr T infinity() { return T(INFINITY); }   \
    static __forceinline__ constexpr T quiet_NaN() { return T(NAN); }       \
  };
LILY_FLOAT_LIMITS(float, 1.175494351e-38f, 3.402823466e+38f, 1.192092896e-07f)
LILY_FLOAT_LIMITS(half, 6.103515625e-05f, 65504.0f, 9.765625e-04f)
LILY_FLOAT_LIMITS(bfloat, 1.175494351e-38f, 3.389531390e+38f, 7.8125e-03f)
#undef LILY_FLOAT_LIMITS

}  // namespace metal
using namespace metal;
}  // namespace lily
