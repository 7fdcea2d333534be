// Router choice for a chunk: experts[m, r] = id of the r-th largest of logits[m, 0..E), ties to the higher id;
// scores[m, r] = its softmax probability (over the chosen ones where NORMALISE, over all E otherwise);
// scores[m, TOP_K] = sigmoid(logits[m, E]), the shared expert's weight. float32 throughout.
// Grid: one simdgroup per row, any number of simdgroups per threadgroup; those beyond the last row are idle.
// Bytes: 4 (E + 1) read and 8 TOP_K + 4 written per row.
const uint lane = thread_index_in_simdgroup;
const uint row = thread_position_in_grid.x / 32u;
if (row < uint(logits_shape[0])) {
  const uint first = row * uint(E + 1);
  uint keys[PER_LANE];
  for (int i = 0; i < PER_LANE; ++i) {
    const uint id = lane + 32u * uint(i);
    keys[i] = 0u;
    if (id < uint(E)) {
      keys[i] = logit_key(logits[first + id]);
    }
  }
  uint expert;
  float score;
  select_experts<PER_LANE, TOP_K, NORMALISE>(keys, lane, TOP_K, expert, score);
  if (lane < uint(TOP_K)) {
    experts[row * uint(TOP_K) + lane] = expert;
    scores[row * uint(TOP_K + 1) + lane] = score;
  }
  if (lane == 0u) {
    scores[row * uint(TOP_K + 1) + uint(TOP_K)] = 1.0f / (1.0f + metal::precise::exp(-logits[first + uint(E)]));
  }
}
