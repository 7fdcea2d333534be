// out[m, k] = bfloat16(weight[tokens[m], k]) for a quantised table [N, K].
//
// Grid: (K / 32, M) threads in threadgroups of (UNITS, 1); a thread owns 32 columns of one token.
// An id beyond the table reads the last row, so that no value of a token slot reaches foreign memory.
// Bytes: one row of codes read and one of bfloat16 written for each token.
const int unit = int(thread_position_in_grid.x);
const int m = int(thread_position_in_grid.y);
const size_t row = size_t(metal::min(uint(tokens[m]), uint(N) - 1u));
const size_t group = row * (K / GROUP) + unit / (GROUP / UNIT);
const device bfloat* scales = scales_of<BITS, GROUP, K>(weight, N);
const device bfloat* biases = biases_of<BITS, GROUP, K>(weight, N);
Codes<BITS> codes = load_codes<BITS>(weight + row * (K / UNIT * BITS) + unit * BITS);
float values[UNIT];
dequantize_unit<BITS>(codes, float(scales[group]), float(biases[group]), values);
device uint4* target = (device uint4*)(out + size_t(m) * K + unit * UNIT);
#pragma unroll
for (int i = 0; i < 4; ++i) {
  target[i] = pack_eight(&values[8 * i]);
}
