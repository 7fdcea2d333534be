// Choice of the TOP_K largest of the E logits held by one simdgroup, PER_LANE = ceil(E / 32) in each lane:
// element i of a lane belongs to expert lane + 32 * i. All 32 lanes must call these together.

// Unsigned keys in the order of the logits. NaN ranks with minus infinity and both zeros are equal. Key 0 is below
// every logit: it marks ids >= E and experts already taken.
inline uint logit_key(float logit) {
  float value = metal::isnan(logit) ? -INFINITY : (logit == 0.0f ? 0.0f : logit);
  uint bits = as_type<uint>(value);
  return (bits & 0x80000000u) != 0u ? ~bits : (bits | 0x80000000u);
}

inline float key_logit(uint key) {
  return as_type<float>((key & 0x80000000u) != 0u ? (key & 0x7fffffffu) : ~key);
}

// Removes the largest key from the simdgroup; returns its expert, the higher id among equal keys.
template <int PER_LANE>
inline uint take_largest(thread uint (&keys)[PER_LANE], uint lane, thread uint& key) {
  uint best = keys[0];
  int best_index = 0;
  for (int i = 1; i < PER_LANE; ++i) {
    if (keys[i] >= best) {
      best = keys[i];
      best_index = i;
    }
  }
  key = simd_max(best);
  uint candidate = lane + 32u * uint(best_index);
  uint winner = simd_max(best == key ? candidate + 1u : 0u) - 1u;
  for (int i = 0; i < PER_LANE; ++i) {
    keys[i] = lane + 32u * uint(i) == winner ? 0u : keys[i];
  }
  return winner;
}

// After the call, lane r < rounds holds the expert of rank r, and (where rounds == TOP_K) its score:
// NORMALISE: softmax over the chosen logits; otherwise the softmax over all E logits. TOP_K <= 32.
template <int PER_LANE, int TOP_K, bool NORMALISE>
inline void select_experts(
    thread uint (&keys)[PER_LANE], uint lane, int rounds, thread uint& expert, thread float& score) {
  float all = 0.0f;
  float largest = 0.0f;
  if (!NORMALISE) {
    uint best = 0u;
    for (int i = 0; i < PER_LANE; ++i) {
      best = metal::max(best, keys[i]);
    }
    largest = key_logit(simd_max(best));
    for (int i = 0; i < PER_LANE; ++i) {
      all += keys[i] != 0u ? metal::precise::exp(key_logit(keys[i]) - largest) : 0.0f;
    }
    all = simd_sum(all);
  }
  expert = 0u;
  float logit = -INFINITY;
  for (int r = 0; r < rounds; ++r) {
    uint key;
    uint winner = take_largest<PER_LANE>(keys, lane, key);
    float value = key_logit(key);
    if (r == 0) {
      largest = value;
    }
    if (lane == uint(r)) {
      expert = winner;
      logit = value;
    }
  }
  float exponential = lane < uint(rounds) ? metal::precise::exp(logit - largest) : 0.0f;
  float total = NORMALISE ? simd_sum(exponential) : all;
  score = exponential / total;
}
