// One draw from softmax(logits / temperature) over the tokens that the filters keep. Tokens in the order of their
// logits, the lower id first among equals; p = softmax(logits):
//   top-p keeps a token while the sum of p over the larger logits is below top_p;
//   min-p keeps logits >= largest + log(min_p), and the first min_tokens_to_keep whatever their logits;
//   XTC, with its probability, drops all tokens of p (over those kept so far) above its threshold but the least
//   of them and the special ones;
//   top-k keeps the first top_k of the rest.
// So what is kept is a beginning of the order: a lowest logit, and a last id among its equals.
//
// A sequence whose settings say UNFILTERED takes the token of its largest part, see adjust.metal.
//
// Grid: one threadgroup of 32 * SIMDGROUPS threads for each sequence, one sequence after another in all arrays. The
// parts' largest logits and totals bound the lowest kept logit from below. Each thread lists the tokens above the bound in its share of the parts, and skips parts without any;
// the lists are then searched by bisection. Bytes: the logits of the parts that are not skipped, and the lists.
constexpr uint THREADS = 32u * uint(SIMDGROUPS);
constexpr int PER_LANE = SLICE / 32;
threadgroup uint counts[SIMDGROUPS];
threadgroup float masses[SIMDGROUPS];
threadgroup uint group_indices[SIMDGROUPS];
const uint lane = thread_index_in_simdgroup;
const uint simd_group = simdgroup_index_in_threadgroup;
const uint thread_id = thread_index_in_threadgroup;
const uint vocabulary = uint(logits_shape[1]);
const uint sequence = threadgroup_position_in_grid.x;
const uint sequences = threadgroups_per_grid.x;
const uint parts = uint(largest_shape[0]) / sequences;
const uint first_part = sequence * parts;
const uint set = sequence * uint(SETTINGS);
const size_t row = size_t(sequence) * vocabulary; // of logits
// Every thread can list all tokens of its share.
const size_t listed = size_t((parts + uint(SIMDGROUPS) - 1u) / uint(SIMDGROUPS)) * uint(SLICE * SIMDGROUPS);
device uint* keys = all_keys + sequence * listed;
device uint* ids = all_ids + sequence * listed;
device float* weights = all_weights + sequence * listed;
const uint specials = uint(special_tokens_shape[0]) / sequences;
const uint step = uint(position[sequence]);
const float inverse_temperature = 1.0f / settings[set + TEMPERATURE];
const float top_p = settings[set + TOP_P];
const uint top_k = uint(settings[set + TOP_K]);
const float xtc_probability = settings[set + XTC_PROBABILITY];
const float xtc_threshold = settings[set + XTC_THRESHOLD];
// mlx_lm keeps the logits where its random number is above the probability.
const bool excluding = xtc_probability > 0.0f && uniform_below_one(philox(seed[sequence], 1u, 0u, step)) <= xtc_probability;

if (settings[set + UNFILTERED] != 0.0f) {
  float likeliest = -INFINITY;
  uint likeliest_token = 0xffffffffu;
  for (uint i = thread_id; i < parts; i += THREADS) {
    take_better(likeliest, likeliest_token, largest[first_part + i], uint(total[first_part + i]));
  }
  simd_best(likeliest, likeliest_token);
  if (lane == 0u) {
    masses[simd_group] = likeliest;
    group_indices[simd_group] = likeliest_token;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_id == 0u) {
    for (int i = 1; i < SIMDGROUPS; ++i) {
      take_better(likeliest, likeliest_token, masses[i], group_indices[i]);
    }
    token[sequence] = likeliest_token;
    next_position[sequence] = position[sequence] + 1;
    lowest_logit[sequence] = -INFINITY;
    last_token[sequence] = 0xffffffffu;
    highest_logit[sequence] = INFINITY;
  }
  return;
}

float own_best = -INFINITY;
for (uint i = thread_id; i < parts; i += THREADS) {
  own_best = metal::max(own_best, largest[first_part + i]);
}
own_best = simd_max(own_best);
if (lane == 0u) {
  masses[simd_group] = own_best;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float best = masses[0];
for (int i = 1; i < SIMDGROUPS; ++i) {
  best = metal::max(best, masses[i]);
}
float own_mass = 0.0f;
for (uint i = thread_id; i < parts; i += THREADS) {
  own_mass += total[first_part + i] * relative_weight(largest[first_part + i], best);
}
const float all = threadgroup_tally<SIMDGROUPS>(0u, own_mass, counts, masses, simd_group, lane).mass;
const uint best_key = logit_key(best);
KeepRule rule;
rule.mass = top_p * all;
rule.most = top_k;
rule.floor = logit_key(best + settings[set + LOG_MIN_P]);
rule.least = uint(settings[set + MIN_TOKENS_TO_KEEP]);

// A key that no kept token is below: from the parts it is known that at most `below` of the mass is at or below a
// key, and that at least `count` tokens are above it. XTC takes away at most 1 / threshold tokens before top-k.
uint bound_most = top_k;
if (excluding) {
  bound_most = top_k + (xtc_threshold > 1e-6f ? uint(1.0f / xtc_threshold) + 1u : vocabulary);
}
uint low = metal::min(logit_key(-INFINITY) + 1u, best_key);
uint high = best_key;
while (low < high) {
  const uint middle = low + (high - low) / 2u;
  const float most_mass = float(SLICE) * relative_weight(key_logit(middle), best);
  uint count = 0u;
  float below = 0.0f;
  for (uint i = thread_id; i < parts; i += THREADS) {
    count += logit_key(largest[first_part + i]) > middle ? 1u : 0u;
    below += metal::min(total[first_part + i] * relative_weight(largest[first_part + i], best), most_mass);
  }
  const Tally tally = threadgroup_tally<SIMDGROUPS>(count, below, counts, masses, simd_group, lane);
  const bool dropped = tally.mass < (1.0f - top_p) * all || tally.count >= bound_most ||
      (middle < rule.floor && tally.count >= rule.least);
  if (dropped) {
    low = middle + 1u;
  } else {
    high = middle;
  }
}

uint mine = 0u;
for (uint part = simd_group; part < parts; part += uint(SIMDGROUPS)) {
  if (logit_key(largest[first_part + part]) >= low) {
    float values[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) { // all loads at once
      const uint id = part * uint(SLICE) + uint(i) * 32u + lane;
      values[i] = logits[row + metal::min(id, vocabulary - 1u)];
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const uint id = part * uint(SLICE) + uint(i) * 32u + lane;
      const uint key = logit_key(values[i]);
      if (id < vocabulary && key >= low) {
        const uint at = mine * THREADS + thread_id;
        keys[at] = key;
        ids[at] = id;
        weights[at] = relative_weight(key_logit(key), best);
        mine += 1u;
      }
    }
  }
}

uint highest = 0xffffffffu;
uint first_lowest = 0u; // kept before XTC: keys from this on, equals of it up to this id
uint first_last = 0xffffffffu;
if (excluding) {
  rule.most = 0xffffffffu;
  const uint lowest =
      lowest_kept<SIMDGROUPS>(rule, keys, weights, mine, low, best_key, thread_id, counts, masses, simd_group, lane);
  const uint last = last_kept<SIMDGROUPS>(
      rule, keys, weights, ids, mine, lowest, vocabulary, thread_id, counts, masses, simd_group, lane);
  float kept = 0.0f;
  for (uint i = 0u; i < mine; ++i) {
    const uint at = i * THREADS + thread_id;
    const bool dropped = keys[at] < lowest || (keys[at] == lowest && ids[at] > last);
    keys[at] = dropped ? 0u : keys[at];
    kept += dropped ? 0.0f : weights[at];
  }
  const float likely =
      xtc_threshold * threadgroup_tally<SIMDGROUPS>(0u, kept, counts, masses, simd_group, lane).mass;
  // The least of the likely tokens.
  for (uint i = 0u; i < mine; ++i) {
    const uint at = i * THREADS + thread_id;
    highest = keys[at] != 0u && weights[at] > likely ? metal::min(highest, keys[at]) : highest;
  }
  highest = simd_min(highest);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0u) {
    counts[simd_group] = highest;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < SIMDGROUPS; ++i) {
    highest = metal::min(highest, counts[i]);
  }
  for (uint i = 0u; i < mine; ++i) {
    const uint at = i * THREADS + thread_id;
    if (keys[at] > highest) {
      bool special = false;
      for (uint j = 0u; j < specials; ++j) {
        special = special || special_tokens[sequence * specials + j] == ids[at];
      }
      keys[at] = special ? keys[at] : 0u;
    }
  }
  // What is left is limited by its number only.
  rule.mass = INFINITY;
  rule.most = top_k;
  rule.floor = 0u;
  low = lowest;
  first_lowest = lowest;
  first_last = last;
}
const uint lowest =
    lowest_kept<SIMDGROUPS>(rule, keys, weights, mine, low, best_key, thread_id, counts, masses, simd_group, lane);
uint last = last_kept<SIMDGROUPS>(
    rule, keys, weights, ids, mine, lowest, vocabulary, thread_id, counts, masses, simd_group, lane);
if (lowest == first_lowest) {
  last = metal::min(last, first_last);
}

float chosen = -INFINITY;
uint chosen_token = 0xffffffffu;
for (uint i = 0u; i < mine; ++i) {
  const uint at = i * THREADS + thread_id;
  if (keys[at] > lowest || (keys[at] == lowest && ids[at] <= last)) {
    const float value = key_logit(keys[at]) * inverse_temperature + gumbel(philox(seed[sequence], 0u, ids[at], step));
    take_better(chosen, chosen_token, value, ids[at]);
  }
}
simd_best(chosen, chosen_token);
threadgroup_barrier(mem_flags::mem_threadgroup);
if (lane == 0u) {
  masses[simd_group] = chosen;
  group_indices[simd_group] = chosen_token;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_id == 0u) {
  for (int i = 1; i < SIMDGROUPS; ++i) {
    take_better(chosen, chosen_token, masses[i], group_indices[i]);
  }
  token[sequence] = chosen_token;
  next_position[sequence] = position[sequence] + 1;
  lowest_logit[sequence] = key_logit(lowest);
  last_token[sequence] = last;
  highest_logit[sequence] = highest == 0xffffffffu ? INFINITY : key_logit(highest);
}
