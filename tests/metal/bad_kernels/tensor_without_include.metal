// rejected, language: no member named 'tensor' in namespace 'metal'
// body
metal::tensor<threadgroup bfloat, int, int> left(0, 0, 0); // BAD
out[thread_position_in_grid.x] = x[0];
