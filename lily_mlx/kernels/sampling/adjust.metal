// adjusted[v] = logits[v] + bias[v], then the penalties in this order:
//   repetition: divided by the penalty, or multiplied by it where negative, if v is among the recent tokens;
//   presence: less the penalty, if v is among them;  frequency: less the penalty for each time.
// `recent` remembers the last R tokens fed, R a power of two: the one at position p stands at p % R. `tokens` are
// those fed now, the last one at `position`; next_recent has them too. Each penalty looks back on its own number.
//
// A part is SLICE consecutive tokens. If FILTERED, for `draw`: best_value is the part's largest adjusted logit and
// total the sum of exp(adjusted - best_value). Otherwise, for `select`: best_value is the largest adjusted logit
// (temperature 0) or the largest of adjusted / temperature + Gumbel noise, keyed like the head's; total is 0.
//
// With several sequences each array holds one after another; then `tokens` is one token of each (ONE_EACH), and with
// FILTERED a sequence whose settings say UNFILTERED gets best_value as for `select`, and total is its token's id.
//
// Grid: (parts, sequences), one threadgroup of 32 * SIMDGROUPS threads each. Bytes: logits read and written once, recent
// and the list of biases (from cache) once for each part.
constexpr uint THREADS = 32u * uint(SIMDGROUPS);
constexpr uint IN_REPETITION = 0x80000000u;
constexpr uint IN_PRESENCE = 0x40000000u;
constexpr uint TIMES = 0x3fffffffu;
threadgroup metal::atomic_uint seen[SLICE]; // two flags and the number of times in the frequency penalty's context
threadgroup float bias[SLICE];
threadgroup float group_values[SIMDGROUPS];
threadgroup float group_totals[SIMDGROUPS];
threadgroup uint group_indices[SIMDGROUPS];
const uint lane = thread_index_in_simdgroup;
const uint simd_group = simdgroup_index_in_threadgroup;
const uint thread_id = thread_index_in_threadgroup;
const uint part = threadgroup_position_in_grid.x;
const uint sequence = threadgroup_position_in_grid.y;
const uint sequences = threadgroups_per_grid.y;
const uint first = part * uint(SLICE);
const uint vocabulary = uint(logits_shape[1]);
const size_t row = size_t(sequence) * vocabulary; // of logits and adjusted
const uint set = sequence * uint(SETTINGS);
const float temperature = settings[set + TEMPERATURE];
const float inverse_temperature = temperature > 0.0f ? 1.0f / temperature : 1.0f;
const bool filtered = FILTERED && settings[set + UNFILTERED] == 0.0f;
const bool noisy = !filtered && temperature > 0.0f;
const uint key = seed[sequence];
const uint now = uint(position[sequence]);

for (uint i = thread_id; i < uint(SLICE); i += THREADS) {
  atomic_store_explicit(&seen[i], 0u, memory_order_relaxed);
  bias[i] = 0.0f;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const uint slots = uint(recent_shape[0]) / sequences;
const uint fed = ONE_EACH ? 1u : uint(tokens_shape[0]);
const uint repetition_context = uint(settings[set + REPETITION_CONTEXT]);
const uint presence_context = uint(settings[set + PRESENCE_CONTEXT]);
const uint frequency_context = uint(settings[set + FREQUENCY_CONTEXT]);
for (uint slot = thread_id; slot < slots; slot += THREADS) {
  const uint age = (now - slot) & (slots - 1u); // 0: fed last
  uint token = recent[sequence * slots + slot];
  if (age < fed) {
    token = tokens[sequence * fed + fed - 1u - age];
  }
  if (part == 0u) {
    next_recent[sequence * slots + slot] = token;
  }
  const uint place = token - first;
  if (place < uint(SLICE)) {
    const uint flags = (age < repetition_context ? IN_REPETITION : 0u) | (age < presence_context ? IN_PRESENCE : 0u);
    atomic_fetch_or_explicit(&seen[place], flags, memory_order_relaxed);
    atomic_fetch_add_explicit(&seen[place], age < frequency_context ? 1u : 0u, memory_order_relaxed);
  }
}
const uint biases = uint(bias_ids_shape[0]) / sequences;
for (uint i = thread_id; i < biases; i += THREADS) {
  const uint place = bias_ids[sequence * biases + i] - first;
  if (place < uint(SLICE)) {
    bias[place] = bias_values[sequence * biases + i];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

constexpr int PER_THREAD = SLICE / (32 * SIMDGROUPS);
float values[PER_THREAD];
float best = -INFINITY;
uint best_token = 0xffffffffu;
#pragma unroll
for (int i = 0; i < PER_THREAD; ++i) {
  const uint place = thread_id + uint(i) * THREADS;
  const uint token = first + place;
  values[i] = -INFINITY;
  if (token < vocabulary) {
    const uint marks = atomic_load_explicit(&seen[place], memory_order_relaxed);
    float value = logits[row + token] + bias[place];
    if ((marks & IN_REPETITION) != 0u) {
      const float penalty = settings[set + REPETITION_PENALTY];
      value = value < 0.0f ? value * penalty : value / penalty;
    }
    if ((marks & IN_PRESENCE) != 0u) {
      value -= settings[set + PRESENCE_PENALTY];
    }
    value -= float(marks & TIMES) * settings[set + FREQUENCY_PENALTY];
    adjusted[row + token] = value;
    values[i] = metal::isnan(value) ? -INFINITY : value;
    if (noisy) {
      value = value * inverse_temperature + gumbel(philox(key, 0u, token, now));
    }
    take_better(best, best_token, value, token);
  }
}

simd_best(best, best_token);
if (lane == 0u) {
  group_values[simd_group] = best;
  group_indices[simd_group] = best_token;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
best = group_values[0];
best_token = group_indices[0];
for (int i = 1; i < SIMDGROUPS; ++i) {
  take_better(best, best_token, group_values[i], group_indices[i]);
}
float sum = 0.0f;
if (filtered) {
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    sum += first + thread_id + uint(i) * THREADS < vocabulary ? relative_weight(values[i], best) : 0.0f;
  }
}
sum = simd_sum(sum);
if (lane == 0u) {
  group_totals[simd_group] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_id == 0u) {
  for (int i = 1; i < SIMDGROUPS; ++i) {
    sum += group_totals[i];
  }
  const uint entry = sequence * threadgroups_per_grid.x + part;
  best_value[entry] = best;
  best_index[entry] = best_token;
  total[entry] = FILTERED && !filtered ? float(best_token) : sum; // exact: ids are below 2^24
}
