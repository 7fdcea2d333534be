// out[n] = bfloat(residual[n] + sum over slots s of score[s] * rows[s, n]), slots in order. Scores: bits in `routing`.
// Grid: one thread per n. Bytes: 4 (TOP_K + 1) + 4 per n.
const uint n = thread_position_in_grid.x;
if (n < uint(N)) {
  float total = 0.0f;
  for (int slot = 0; slot <= TOP_K; ++slot) {
    total += as_type<float>(uint(routing[TOP_K + slot])) * rows[size_t(slot) * N + n];
  }
  out[n] = bfloat(float(residual[n]) + total);
}
