// Counter-based random numbers: Philox 4x32-10 of Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3" (2011). A value depends on its key and counter only, never on the launch.

inline uint high_product(uint a, uint b) {
  return uint((ulong(a) * ulong(b)) >> 32);
}

// First of the four words for the 64-bit key (key_low, key_high) and the counter (c0, c1, 0, 0).
inline uint philox(uint key_low, uint key_high, uint c0, uint c1) {
  uint c2 = 0u;
  uint c3 = 0u;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    uint high0 = high_product(0xD2511F53u, c0);
    uint low0 = 0xD2511F53u * c0;
    uint high1 = high_product(0xCD9E8D57u, c2);
    uint low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ key_low;
    c1 = low1;
    c2 = high0 ^ c3 ^ key_high;
    c3 = low0;
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return c0;
}

// Standard Gumbel noise -log(-log(1 - v)) for v uniform in (0, 1) with steps of 2^-32. The largest noise,
// which decides a draw, comes from small v, where -log(1 - v) needs its series to keep precision.
inline float gumbel(uint bits) {
  float v = metal::min((float(bits) + 0.5f) / 4294967296.0f, 0.99999994f);
  float exponential = -metal::precise::log(1.0f - v);
  if (v < 0.01f) {
    exponential = v * (1.0f + v * (0.5f + v * (1.0f / 3.0f + v * 0.25f)));
  }
  return -metal::precise::log(exponential);
}

// Uniform in [0, 1) with steps of 2^-24.
inline float uniform_below_one(uint bits) {
  return float(bits >> 8) / 16777216.0f;
}
