// rejected, shuffle-bfloat: not bfloat
// helpers
// body
const uint i = thread_position_in_grid.x;
out[i] = float(simd_shuffle_xor(w[i], ushort(1))); // BAD
