// rejected, language: deleted constructor
#if __METAL_VERSION__ >= 400
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#endif
typedef metal::tensor<threadgroup bfloat, metal::dextents<int32_t, 2>, metal::tensor_inline> Operand;
// body
constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
    16, 16, 16, false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> product;
auto acc = product.template get_destination_cooperative_tensor<Operand, Operand, float>();
auto second = acc; // BAD
out[thread_index_in_threadgroup] = second[0];
