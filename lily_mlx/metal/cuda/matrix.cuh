// simdgroup_matrix<T, 8, 8> on tensor cores.
//
// Lane l holds the elements (l / 4, 2 (l % 4)) and the one to its right: the layout of mma's accumulators
// and of its left operand. The right operand wants the transposed layout, which movmatrix (bfloat, half) or
// shuffles (float) make. The instructions work on 16 rows; here the lower 8 are zero. Kernels that want the
// full rate use Tile.
#define LILY_FRAGMENT

namespace lily {
namespace metal {

__forceinline__ int lily_fragment_row(uint lane) { return int(lane >> 2); }
__forceinline__ int lily_fragment_column(uint lane) { return int(lane & 3) * 2; }

template <class T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  static_assert(ROWS == 8 && COLUMNS == 8, "simdgroup_matrix is 8 x 8");
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  // The diagonal matrix of one value.
  __forceinline__ explicit simdgroup_matrix(T diagonal) {
    const int offset = lily_fragment_row(simd_lane()) - lily_fragment_column(simd_lane());
    elements = vec<T, 2>(offset == 0 ? diagonal : T(0.0f), offset == 1 ? diagonal : T(0.0f));
  }
  __forceinline__ vec<T, 2>& thread_elements() { return elements; }
  __forceinline__ const vec<T, 2>& thread_elements() const { return elements; }
};

using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int ROWS, int COLUMNS = ROWS>
__forceinline__ simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, ROWS, COLUMNS> result;
  result.elements = vec<T, 2>(value);
  return result;
}

template <class T>
__forceinline__ void simdgroup_load(
    simdgroup_matrix<T, 8, 8>& matrix, const T* source, ulong elements_per_row = 8, ulong2 origin = ulong2(0, 0),
    bool transpose = false) {
  const ulong row = ulong(lily_fragment_row(simd_lane())), column = ulong(lily_fragment_column(simd_lane()));
  source += origin.y * elements_per_row + origin.x;
  if (transpose) {
    matrix.elements.x = source[column * elements_per_row + row];
    matrix.elements.y = source[(column + 1) * elements_per_row + row];
  } else {
    matrix.elements.x = source[row * elements_per_row + column];
    matrix.elements.y = source[row * elements_per_row + column + 1];
  }
}

template <class T>
__forceinline__ void simdgroup_store(
    simdgroup_matrix<T, 8, 8> matrix, T* target, ulong elements_per_row = 8, ulong2 origin = ulong2(0, 0),
    bool transpose = false) {
  const ulong row = ulong(lily_fragment_row(simd_lane())), column = ulong(lily_fragment_column(simd_lane()));
  target += origin.y * elements_per_row + origin.x;
  if (transpose) {
    target[column * elements_per_row + row] = matrix.elements.x;
    target[(column + 1) * elements_per_row + row] = matrix.elements.y;
  } else {
    target[row * elements_per_row + column] = matrix.elements.x;
    target[row * elements_per_row + column + 1] = matrix.elements.y;
  }
}

// ---- products: c[0..1] += row of A * columns of B -------------------------------------------------------

__forceinline__ uint transposed_fragment(uint pair) {
  uint result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

#define LILY_PRODUCT_16BIT(T, NAME)                                                                    \
  __forceinline__ void fragment_product(float2& c, vec<T, 2> a, vec<T, 2> b) {                         \
    float unused0 = 0.0f, unused1 = 0.0f;                                                              \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." NAME "." NAME ".f32 "                         \
                 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                                 \
                 : "+f"(c.x), "+f"(c.y), "+f"(unused0), "+f"(unused1)                                  \
                 : "r"(as_type<uint>(a)), "r"(0u), "r"(transposed_fragment(as_type<uint>(b))));        \
  }
LILY_PRODUCT_16BIT(bfloat, "bf16")
LILY_PRODUCT_16BIT(half, "f16")
#undef LILY_PRODUCT_16BIT

__forceinline__ uint to_tf32(float value) {
  uint result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return result;
}

// The instruction's k index is free to be permuted: slot t stands for column 2t, slot t + 4 for 2t + 1.
__forceinline__ void product_tf32(float2& c, uint2 a, uint2 b) {
  float unused0 = 0.0f, unused1 = 0.0f;
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c.x), "+f"(c.y), "+f"(unused0), "+f"(unused1)
               : "r"(a.x), "r"(0u), "r"(a.y), "r"(0u), "r"(b.x), "r"(b.y));
}

// float as a sum of two tf32 numbers: three products keep about 21 bits.
__forceinline__ void fragment_product(float2& c, float2 a, float2 b) {
  const uint lane = simd_lane();
  const ushort source = ushort((lane & 3) * 8 + (lane >> 3));  // holds (2t, g - g % 2) and its right neighbour
  const bool odd = lane >> 2 & 1;
  const float x0 = simd_shuffle(b.x, source), y0 = simd_shuffle(b.y, source);
  const float x1 = simd_shuffle(b.x, ushort(source + 4)), y1 = simd_shuffle(b.y, ushort(source + 4));
  const float2 right = float2(odd ? y0 : x0, odd ? y1 : x1);
  const uint2 a_high = uint2(to_tf32(a.x), to_tf32(a.y)), b_high = uint2(to_tf32(right.x), to_tf32(right.y));
  const float2 a_rest = a - as_type<float2>(a_high), b_rest = right - as_type<float2>(b_high);
  product_tf32(c, uint2(to_tf32(a_rest.x), to_tf32(a_rest.y)), b_high);
  product_tf32(c, a_high, uint2(to_tf32(b_rest.x), to_tf32(b_rest.y)));
  product_tf32(c, a_high, b_high);
}

// Operands of two types meet in float.
template <class A, class B>
__forceinline__ void fragment_product(float2& c, vec<A, 2> a, vec<B, 2> b) {
  fragment_product(c, float2(float(a.x), float(a.y)), float2(float(b.x), float(b.y)));
}

template <class D, class A, class B, class C>
__forceinline__ void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c) {
  float2 sum = float2(float(c.elements.x), float(c.elements.y));
  fragment_product(sum, a.elements, b.elements);
  d.elements = vec<D, 2>(D(sum.x), D(sum.y));
}

template <class D, class A, class B>
__forceinline__ void simdgroup_multiply(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
  float2 sum = float2(0.0f);
  fragment_product(sum, a.elements, b.elements);
  d.elements = vec<D, 2>(D(sum.x), D(sum.y));
}

}  // namespace metal
}  // namespace lily
