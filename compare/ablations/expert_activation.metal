// out[s, n] = bfloat(silu(gate[s, n]) * up[s, n]) for the TOTAL values of all slots.
// Grid: one thread per value. Bytes: 8 read and 2 written per value.
const uint i = thread_position_in_grid.x;
if (i < uint(TOTAL)) {
  const float value = gate[i];
  out[i] = bfloat(value * (1.0f / (1.0f + metal::precise::exp(-value))) * up[i]);
}
