// rejected, simd-uniform: run under a condition that depends on the thread
#if __METAL_VERSION__ >= 400
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#endif
typedef metal::tensor<threadgroup bfloat, metal::dextents<int32_t, 2>, metal::tensor_inline> Operand;
// body
threadgroup bfloat tile[256];
constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
    16, 16, 16, false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> product;
auto acc = product.template get_destination_cooperative_tensor<Operand, Operand, float>();
Operand left(tile, metal::dextents<int32_t, 2>(16, 16), metal::array<int32_t, 2>{1, 16});
if (thread_index_in_simdgroup < 16) {
  product.run(left, left, acc); // BAD
}
out[thread_position_in_grid.x] = acc[0];
