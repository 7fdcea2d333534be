// rejected, language: no matching constructor
#if __METAL_VERSION__ >= 400
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#endif
typedef metal::tensor<threadgroup bfloat, metal::dextents<int32_t, 2>, metal::tensor_inline> Operand;
inline void take(const threadgroup bfloat* a) {
  Operand left(a, metal::dextents<int32_t, 2>(16, 16), metal::array<int32_t, 2>{1, 16}); // BAD
}
// body
threadgroup bfloat tile[256];
take(tile);
out[thread_position_in_grid.x] = x[0];
