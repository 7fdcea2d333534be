// Affine quantised weights in mx.quantize's packing: w = scale * code + bias.
//
// A weight [N, K] has K * BITS / 32 words per row. The codes of a row are one stream of bits, low bits
// first, so 32 codes fill BITS words exactly, whatever BITS is (2, 3, 4, 5, 6 or 8). Those 32 codes are a
// "unit" here: 16 bytes at 4 bits. Scales and biases are bfloat16 [N, K / GROUP]; GROUP is 32, 64 or 128,
// so a unit never crosses a group. One array holds all of it: see scales_of.
//
// BITS 16 is a weight that is not quantised: its codes are bfloat16 values, w = code. It has no scales and biases, and
// GROUP is larger than K, so that K / GROUP is 0 and every load of a scale goes to one place, whose value is not used.
//
// Matrix-vector: the LANES lanes of a row walk its units with stride LANES, so adjacent lanes read adjacent
// 16 bytes. Each lane keeps a unit of x in registers and uses it for ROWS rows:
//     acc[row] += scale * dot(code, x) + bias * sum(x)
// In a tile: see operands.h, which writes w, rounded to bfloat16, to threadgroup memory.
#ifndef LILY_QUANTIZED
#define LILY_QUANTIZED

constant constexpr int UNIT = 32;

// ---- a weight in one array ----------------------------------------------------------------------------

// An array of `rows` weight rows has the codes first, then the scales, then the biases, each of the three from a
// multiple of 16 bytes on: `Sections` in kernels/linear/weight.py has the same sums.
template <int BITS, int GROUP, int K>
inline const device bfloat* scales_of(const device uint* weight, size_t rows) {
  return (const device bfloat*)(weight + (rows * (K / UNIT * BITS) + 3) / 4 * 4);
}

template <int BITS, int GROUP, int K>
inline const device bfloat* biases_of(const device uint* weight, size_t rows) {
  return scales_of<BITS, GROUP, K>(weight, rows) + (rows * (K / GROUP) + 7) / 8 * 8;
}

// ---- bfloat16 pairs: the first value of a pair is in the low half of a word ----------------------------

inline float unpack_low(uint pair) {
  return as_type<float>(pair << 16);
}

inline float unpack_high(uint pair) {
  return as_type<float>(pair & 0xffff0000u);
}

inline uint pack_pair(float low, float high) {
  return uint(as_type<ushort>(bfloat(low))) | (uint(as_type<ushort>(bfloat(high))) << 16);
}

// Eight bfloat16 values from 16 bytes.
inline void unpack_eight(uint4 packed, thread float* values) {
  values[0] = unpack_low(packed.x);
  values[1] = unpack_high(packed.x);
  values[2] = unpack_low(packed.y);
  values[3] = unpack_high(packed.y);
  values[4] = unpack_low(packed.z);
  values[5] = unpack_high(packed.z);
  values[6] = unpack_low(packed.w);
  values[7] = unpack_high(packed.w);
}

inline uint4 pack_eight(const thread float* values) {
  return uint4(
      pack_pair(values[0], values[1]), pack_pair(values[2], values[3]), pack_pair(values[4], values[5]),
      pack_pair(values[6], values[7]));
}

// ---- a unit of activations ----------------------------------------------------------------------------

// 32 bfloat16 values; `x` is 16-byte aligned.
inline void load_unit(const device bfloat* x, int unit, thread float (&values)[UNIT]) {
  const device uint4* packed = (const device uint4*)(x + unit * UNIT);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unpack_eight(packed[i], &values[8 * i]);
  }
}

// A vector staged in threadgroup memory keeps the four 16-byte pieces of a unit in a rotated order, so that
// lanes which read the same piece of adjacent units meet different banks.
inline int staged_index(int unit, int piece) {
  return 4 * unit + (piece ^ ((unit >> 1) & 3));
}

inline void store_staged(threadgroup uint4* staged, int unit, int piece, const thread float* values) {
  staged[staged_index(unit, piece)] = pack_eight(values);
}

inline void load_unit(const threadgroup uint4* staged, int unit, thread float (&values)[UNIT]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unpack_eight(staged[staged_index(unit, i)], &values[8 * i]);
  }
}

// ---- a unit of codes ----------------------------------------------------------------------------------

template <int BITS>
struct Codes {
  uint words[BITS];
};

// Reads a unit. Rows of 4- and 8-bit codes are multiples of 16 bytes, which allows 16-byte loads.
template <int BITS>
inline Codes<BITS> load_codes(const device uint* words) {
  Codes<BITS> codes;
  if (BITS % 4 == 0) {
    const device uint4* vectors = (const device uint4*)words;
#pragma unroll
    for (int i = 0; i < BITS / 4; ++i) {
      uint4 vector = vectors[i];
      codes.words[4 * i] = vector.x;
      codes.words[4 * i + 1] = vector.y;
      codes.words[4 * i + 2] = vector.z;
      codes.words[4 * i + 3] = vector.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < BITS; ++i) {
      codes.words[i] = words[i];
    }
  }
  return codes;
}

// (word & mask) | bits: one instruction where the GPU has one with three inputs.
#ifndef LILY_MASK_OR
#define LILY_MASK_OR(word, mask, bits) (((word) & (mask)) | (bits))
#endif

// The float of the masked bits of a word, which lie below bit 23, without a conversion instruction, which is
// slow on every GPU: the bits are the low mantissa of 2^23 + code. Exact.
inline float code_to_float(uint word, uint mask) {
  return as_type<float>(LILY_MASK_OR(word, mask, 0x4b000000u)) - 8388608.0f;
}

// The i-th code of a unit as a float; `i` is a constant once loops are unrolled.
template <int BITS>
inline float code_at(const thread Codes<BITS>& codes, int i) {
  int bit = i * BITS;
  int word = bit / 32;
  int shift = bit % 32;
  uint value = codes.words[word] >> shift;
  if (shift + BITS > 32) {
    value |= codes.words[(word + 1) % BITS] << ((32 - shift) % 32);
  }
  return code_to_float(value, (1u << BITS) - 1u);
}

// Codes of 2, 4 and 8 bits never cross half a word, so a mask is enough and no shift: a code read in place
// is too large by 2^(its position in the half word), and x is made smaller by the same factor beforehand.
template <int BITS>
inline void scale_unit(thread float (&x)[UNIT]) {
  if (16 % BITS == 0) {
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
      x[i] *= 1.0f / float(1 << (BITS * (i % (16 / BITS))));
    }
  }
}

// sum(x), then x scaled for codes_dot.
template <int BITS>
inline float prepare_unit(thread float (&x)[UNIT]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < UNIT; ++i) {
    sum += x[i];
  }
  scale_unit<BITS>(x);
  return sum;
}

// dot(codes, x) for an x that went through prepare_unit.
template <int BITS>
inline float codes_dot(const thread Codes<BITS>& codes, const thread float (&x)[UNIT]) {
  float even = 0.0f;
  float odd = 0.0f;
  if (BITS == 16) {
#pragma unroll
    for (int i = 0; i < BITS; ++i) {
      even = metal::fma(unpack_low(codes.words[i]), x[2 * i], even);
      odd = metal::fma(unpack_high(codes.words[i]), x[2 * i + 1], odd);
    }
  } else if (16 % BITS == 0) {
    constexpr int PER_HALF = 16 / BITS;
    constexpr uint MASK = (1u << BITS) - 1u;
#pragma unroll
    for (int word = 0; word < BITS; ++word) {
      uint low = codes.words[word];
      uint high = low >> 16;
#pragma unroll
      for (int i = 0; i < PER_HALF; ++i) {
        uint mask = MASK << (BITS * i);
        even = metal::fma(code_to_float(low, mask), x[2 * PER_HALF * word + i], even);
        odd = metal::fma(code_to_float(high, mask), x[2 * PER_HALF * word + PER_HALF + i], odd);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < UNIT; i += 2) {
      even = metal::fma(code_at<BITS>(codes, i), x[i], even);
      odd = metal::fma(code_at<BITS>(codes, i + 1), x[i + 1], odd);
    }
  }
  return even + odd;
}

// Four bits of a word that stand at bit 12 (POSITION 12) or 16 of it, dequantised without a shift or a conversion: they
// are mantissa bits of the float 1 + code / 2^(23 - POSITION). The rounding error is below 2^-12 of `scale`.
template <int POSITION>
inline float dequantize_in_place(uint word, float scale, float bias) {
  constexpr float RANGE = float(1 << (23 - POSITION));
  float value = as_type<float>(LILY_MASK_OR(word, 0xfu << POSITION, 0x3f800000u));
  return metal::fma(value, scale * RANGE, bias - scale * RANGE);
}

// The 32 weights of a unit in float.
template <int BITS>
inline void dequantize_unit(const thread Codes<BITS>& codes, float scale, float bias, thread float (&values)[UNIT]) {
  if (BITS == 16) {
#pragma unroll
    for (int i = 0; i < BITS; ++i) {
      values[2 * i] = unpack_low(codes.words[i]);
      values[2 * i + 1] = unpack_high(codes.words[i]);
    }
  } else if (BITS == 4) {
#pragma unroll
    for (int i = 0; i < BITS; ++i) {
      uint word = codes.words[i];
      values[8 * i] = dequantize_in_place<12>(word << 12, scale, bias);
      values[8 * i + 1] = dequantize_in_place<12>(word << 8, scale, bias);
      values[8 * i + 2] = dequantize_in_place<16>(word << 8, scale, bias);
      values[8 * i + 3] = dequantize_in_place<12>(word, scale, bias);
      values[8 * i + 4] = dequantize_in_place<16>(word, scale, bias);
      values[8 * i + 5] = dequantize_in_place<12>(word >> 8, scale, bias);
      values[8 * i + 6] = dequantize_in_place<16>(word >> 8, scale, bias);
      values[8 * i + 7] = dequantize_in_place<12>(word >> 16, scale, bias);
    }
  } else {
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
      values[i] = metal::fma(scale, code_at<BITS>(codes, i), bias);
    }
  }
}

// ---- matrix-vector ------------------------------------------------------------------------------------

// A unit of each of ROWS rows: what a lane reads from memory before it computes.
template <int BITS, int ROWS>
struct RowUnits {
  Codes<BITS> codes[ROWS];
  bfloat scales[ROWS];
  bfloat biases[ROWS];
};

// Reads a unit of rows rows[i]. The rows must exist: clamp the tail and drop its result.
template <int BITS, int GROUP, int K, int ROWS>
inline void load_row_units(
    thread RowUnits<BITS, ROWS>& units,
    int unit,
    const device uint* weight,
    const device bfloat* scales,
    const device bfloat* biases,
    const thread int (&rows)[ROWS]) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    size_t row = size_t(rows[i]);
    units.codes[i] = load_codes<BITS>(weight + row * (K / UNIT * BITS) + unit * BITS);
    size_t group = row * (K / GROUP) + unit / (GROUP / UNIT);
    units.scales[i] = scales[group];
    units.biases[i] = biases[group];
  }
}

// acc[i] += dot(unit of row i, x), for ROWS rows that share x. x and x_sum come from prepare_unit.
template <int BITS, int ROWS>
inline void add_row_units(
    thread float (&acc)[ROWS], const thread RowUnits<BITS, ROWS>& units, const thread float (&x)[UNIT], float x_sum) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float product = codes_dot<BITS>(units.codes[i], x);
    if (BITS == 16) {
      acc[i] += product;
    } else {
      float sum = metal::fma(float(units.biases[i]), x_sum, acc[i]);
      acc[i] = metal::fma(float(units.scales[i]), product, sum);
    }
  }
}

// A lane walks its units of a row, AHEAD of them loaded before they are used. A row's LANES lanes take turns,
// so adjacent lanes read adjacent 16 bytes; `lane` counts within them. AHEAD divides
// the steps of that walk.
template <int BITS, int GROUP, int K, int ROWS, int LANES, int AHEAD>
inline void start_rows(
    thread RowUnits<BITS, ROWS> (&ahead)[AHEAD],
    const device uint* weight,
    const device bfloat* scales,
    const device bfloat* biases,
    const thread int (&rows)[ROWS],
    int lane) {
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    int unit = metal::min(lane + LANES * i, K / UNIT - 1);
    load_row_units<BITS, GROUP, K, ROWS>(ahead[i], unit, weight, scales, biases, rows);
  }
}

// acc[i] += this lane's share of dot(weight[rows[i]], x); sum it over the row's lanes with lanes_sum.
// Where `more`, the first AHEAD units of `next_rows` are loaded on the way.
template <int BITS, int GROUP, int K, int ROWS, int LANES, int AHEAD, typename X>
inline void accumulate_rows(
    thread float (&acc)[ROWS],
    thread RowUnits<BITS, ROWS> (&ahead)[AHEAD],
    X x,
    const device uint* weight,
    const device bfloat* scales,
    const device bfloat* biases,
    const thread int (&rows)[ROWS],
    const thread int (&next_rows)[ROWS],
    bool more,
    int lane) {
  constexpr int STEPS = (K / UNIT + LANES - 1) / LANES;
  for (int start = 0; start < STEPS; start += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      int unit = lane + LANES * (start + i);
      if (K / UNIT % LANES == 0 || unit < K / UNIT) {
        float values[UNIT];
        load_unit(x, unit, values);
        float sum = prepare_unit<BITS>(values);
        add_row_units<BITS, ROWS>(acc, ahead[i], values, sum);
      }
      int next = metal::min(unit + LANES * AHEAD, K / UNIT - 1);
      if (start + AHEAD < STEPS) {
        load_row_units<BITS, GROUP, K, ROWS>(ahead[i], next, weight, scales, biases, rows);
      } else if (more) {
        next = metal::min(lane + LANES * i, K / UNIT - 1);
        load_row_units<BITS, GROUP, K, ROWS>(ahead[i], next, weight, scales, biases, next_rows);
      }
    }
  }
}

// The same for one set of rows.
template <int BITS, int GROUP, int K, int ROWS, int LANES, int AHEAD, typename X>
inline void accumulate_rows(
    thread float (&acc)[ROWS],
    thread RowUnits<BITS, ROWS> (&ahead)[AHEAD],
    X x,
    const device uint* weight,
    const device bfloat* scales,
    const device bfloat* biases,
    const thread int (&rows)[ROWS],
    int lane) {
  accumulate_rows<BITS, GROUP, K, ROWS, LANES, AHEAD>(
      acc, ahead, x, weight, scales, biases, rows, rows, false, lane);
}

// Sum over LANES adjacent lanes (a power of two, at most 32); every one of them gets it.
template <int LANES>
inline float lanes_sum(float value) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    value += simd_shuffle_xor(value, ushort(offset));
  }
  return value;
}
#endif
