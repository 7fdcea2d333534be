// What `adjust` and `draw` share about weights of tokens, and the search for the lowest logit that filters keep.
// Needs moe/select.h (keys in the order of logits) before it.

// exp(logit - largest), 1 where they are equal, infinite ones too.
inline float relative_weight(float logit, float largest) {
  return logit == largest ? 1.0f : metal::precise::exp(logit - largest);
}

// A number of tokens and the sum of their weights.
struct Tally {
  uint count;
  float mass;
};

// The sums over the threadgroup, in an order that never changes. All threads call and get them.
template <int SIMDGROUPS>
inline Tally threadgroup_tally(
    uint count, float mass, threadgroup uint* counts, threadgroup float* masses, uint simd_group, uint lane) {
  count = simd_sum(count);
  mass = simd_sum(mass);
  threadgroup_barrier(mem_flags::mem_threadgroup); // the last call's readers are done
  if (lane == 0u) {
    counts[simd_group] = count;
    masses[simd_group] = mass;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Tally all;
  all.count = 0u;
  all.mass = 0.0f;
  for (int i = 0; i < SIMDGROUPS; ++i) {
    all.count += counts[i];
    all.mass += masses[i];
  }
  return all;
}

// What must hold for a token to be kept, when tokens come in the order of their logits.
struct KeepRule {
  float mass; // of the tokens before it, stays below this (top-p)
  uint most; // of the tokens before it, there are fewer than this (top-k)
  uint floor; // its key is not below this (min-p) ...
  uint least; // ... unless there are fewer tokens than this before it
};

inline bool is_kept(thread const KeepRule& rule, uint key, Tally before) {
  return before.mass < rule.mass && before.count < rule.most && (key >= rule.floor || before.count < rule.least);
}

// A thread's tokens: element i of thread t is at i * THREADS + t.
template <int SIMDGROUPS>
inline Tally tally_above(
    const device uint* keys, const device float* weights, uint mine, uint key, uint thread_id,
    threadgroup uint* counts, threadgroup float* masses, uint simd_group, uint lane) {
  uint count = 0u;
  float mass = 0.0f;
  for (uint i = 0u; i < mine; ++i) {
    const uint at = i * 32u * uint(SIMDGROUPS) + thread_id;
    const bool above = keys[at] > key;
    count += above ? 1u : 0u;
    mass += above ? weights[at] : 0.0f;
  }
  return threadgroup_tally<SIMDGROUPS>(count, mass, counts, masses, simd_group, lane);
}

// The lowest key from `low` to `high` that is kept; `high` is. A sum of more terms that are not negative is never
// smaller, rounded or not, so that the search has one answer.
template <int SIMDGROUPS>
inline uint lowest_kept(
    thread const KeepRule& rule, const device uint* keys, const device float* weights, uint mine, uint low, uint high,
    uint thread_id, threadgroup uint* counts, threadgroup float* masses, uint simd_group, uint lane) {
  while (low < high) {
    const uint middle = low + (high - low) / 2u;
    const Tally before =
        tally_above<SIMDGROUPS>(keys, weights, mine, middle, thread_id, counts, masses, simd_group, lane);
    if (is_kept(rule, middle, before)) {
      high = middle;
    } else {
      low = middle + 1u;
    }
  }
  return low;
}

// The token id up to which tokens with this key are kept: the lower ids, as many as the rule on numbers allow.
template <int SIMDGROUPS>
inline uint last_kept(
    thread const KeepRule& rule, const device uint* keys, const device float* weights, const device uint* ids,
    uint mine, uint key, uint vocabulary, uint thread_id, threadgroup uint* counts, threadgroup float* masses,
    uint simd_group, uint lane) {
  const uint above =
      tally_above<SIMDGROUPS>(keys, weights, mine, key, thread_id, counts, masses, simd_group, lane).count;
  const uint from =
      tally_above<SIMDGROUPS>(keys, weights, mine, key - 1u, thread_id, counts, masses, simd_group, lane).count;
  uint room = rule.most - above;
  if (key < rule.floor) {
    room = metal::min(room, rule.least - above);
  }
  uint low = 0u;
  uint high = vocabulary - 1u;
  if (from - above <= room) {
    low = high; // all of them
  }
  while (low < high) {
    const uint middle = low + (high - low) / 2u;
    uint count = 0u;
    for (uint i = 0u; i < mine; ++i) {
      const uint at = i * 32u * uint(SIMDGROUPS) + thread_id;
      count += keys[at] == key && ids[at] <= middle ? 1u : 0u;
    }
    if (threadgroup_tally<SIMDGROUPS>(count, 0.0f, counts, masses, simd_group, lane).count >= room) {
      high = middle;
    } else {
      low = middle + 1u;
    }
  }
  return low;
}
