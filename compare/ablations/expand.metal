// out[i] = bfloat(scale * code + bias): a quantised weight [N, K] as bfloat pairs in words.
//
// Grid: one thread for each UNIT (32) codes. Bytes: the weight read once, 2 for each code written.
const size_t unit = size_t(thread_position_in_grid.x);
if (unit < size_t(N) * (K / UNIT)) {
  const size_t group = unit / (GROUP / UNIT);
  const device bfloat* scales = scales_of<BITS, GROUP, K>(weight, N);
  const device bfloat* biases = biases_of<BITS, GROUP, K>(weight, N);
  Codes<BITS> codes = load_codes<BITS>(weight + unit * BITS);
  float values[UNIT];
  dequantize_unit<BITS>(codes, float(scales[group]), float(biases[group]), values);
  device uint4* target = (device uint4*)(out + unit * (UNIT / 2));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    target[i] = pack_eight(&values[8 * i]);
  }
}
