// How quantised weights lie in memory, and the numbers behind them.
//
// Outputs go in panels of 16, K in units of 32. A panel holds the quants of its units one after the other, then its
// scales. In a unit, group g (of 8) has the numbers k = 4g .. 4g + 3 of all 16 outputs side by side: 64 bytes, or as
// many nibbles, of which groups g and g + 4 share their bytes. Bits that don't fit a nibble lie behind the nibbles. A
// packed weight is as large as the stored one, but for sizes that are no multiple of 16 and 6-bit scales, which
// take a byte.
//
// An output is  sum over blocks, in order, of  fma(scale * x_scale, sum of integers, .)  and, where the format has
// minima, fma(minimum, x_scaled_sum, .): the same additions on every instruction set and for any number of rows.
#pragma once

#include <utility>

#include "dot.h"

namespace quire {

constexpr int64_t OUTPUTS = 16, UNIT = 32;
constexpr int PER = int(OUTPUTS) / LANES;  // vectors for the outputs of a panel

// In front of loops whose sums must stay in registers.
#define QUIRE_UNROLL QUIRE_UNROLL_BY(16)

// Calls body(integral_constant) for 0 .. COUNT, as COUNT pieces of code.
template <class Body, int... I>
inline __attribute__((always_inline)) void unrolled(Body&& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}
template <int COUNT, class Body>
inline __attribute__((always_inline)) void unrolled(Body&& body) {
  unrolled(body, std::make_integer_sequence<int, COUNT>{});
}

// What the stored bytes of 8-bit numbers differ by from numbers that begin at 0: they are signed where products are.
constexpr uint8_t SIGN = SIGNED_DOT ? 128 : 0;

// The integers of a unit, as they are stored: 0 .. 2^BITS - 1.
template <int BITS>
struct Quants {
  static constexpr int64_t UNIT_BYTES = BITS * 64;

  template <int GROUP>
  static ByteVec group(const uint8_t* unit, int part) {
    const uint8_t* at = unit + part * 4 * LANES;
    if constexpr (BITS == 8) return load_bytes(at + GROUP * 64);
    ByteVec pair = load_bytes(at + GROUP % 4 * 64);
    ByteVec low = GROUP < 4 ? pair & 15 : pair >> 4;
    if constexpr (BITS == 5) {
      ByteVec high = load_bytes(at + 256);
      return low | ((GROUP < 4 ? high << (4 - GROUP) % 8 : high >> (GROUP - 4) % 8) & 16);
    }
    if constexpr (BITS == 6) {
      constexpr int J = GROUP % 4;
      ByteVec high = load_bytes(at + 256 + GROUP / 4 * 64);
      return low | ((J < 2 ? high << (4 - 2 * J) % 8 : high >> (2 * J - 4) % 8) & 48);
    }
    return low;
  }

  // One of them, or in its place.
  static uint8_t get(const uint8_t* unit, int64_t output, int64_t k) {
    const int64_t group = k / 4, lane = output * 4 + k % 4;
    if (BITS == 8) return unit[group * 64 + lane] ^ SIGN;
    unsigned value = unit[group % 4 * 64 + lane] >> group / 4 * 4 & 15;
    if (BITS == 5) value |= (unit[256 + lane] >> group & 1u) << 4;
    if (BITS == 6) value |= (unit[256 + group / 4 * 64 + lane] >> group % 4 * 2 & 3u) << 4;
    return uint8_t(value);
  }
  static void put(uint8_t* unit, int64_t output, int64_t k, unsigned value) {
    const int64_t group = k / 4, lane = output * 4 + k % 4;
    if (BITS == 8) {
      unit[group * 64 + lane] = uint8_t(value) ^ SIGN;
      return;
    }
    unit[group % 4 * 64 + lane] |= uint8_t((value & 15) << group / 4 * 4);
    if (BITS == 5) unit[256 + lane] |= uint8_t(value >> 4 << group);
    if (BITS == 6) unit[256 + group / 4 * 64 + lane] |= uint8_t(value >> 4 << group % 4 * 2);
  }
};

// A weight is scale * (quant - ZERO), or scale * quant + minimum. BLOCKS: how many scales a unit has.
template <bool IS_LARGE_, bool MINIMA_, int BLOCKS_>
struct KindOf {
  static constexpr bool IS_LARGE = IS_LARGE_, MINIMA = MINIMA_;  // IS_LARGE: of 8 bits
  static constexpr int BLOCKS = BLOCKS_;
};
template <int BITS, int ZERO_, bool MINIMA, int BLOCKS = 1, bool PER_OUTPUT_ = false>
struct Packed : Quants<BITS>, KindOf<BITS == 8, MINIMA, BLOCKS> {
  using Kind = KindOf<BITS == 8, MINIMA, BLOCKS>;  // all that matters once quants are bytes and scales float32
  static constexpr int ZERO = ZERO_;
  static constexpr bool PER_OUTPUT = PER_OUTPUT_;  // the sum of an output's blocks has a scale too
};

inline void copy_half(uint8_t* target, const uint8_t* half, int64_t output) { std::memcpy(target + 2 * output, half, 2); }

// float16 scales, and perhaps minima, for each unit.
template <int BITS, int ZERO, bool MINIMA>
struct Simple : Packed<BITS, ZERO, MINIMA> {
  static constexpr int64_t SCALE_BYTES = MINIMA ? 64 : 32;

  static int64_t scale_bytes(int64_t units) { return units * SCALE_BYTES; }
  static Vec scale(const uint8_t* scales, int64_t unit, int, int part) {
    return load_half(scales + unit * SCALE_BYTES + part * 2 * LANES);
  }
  static Vec minimum(const uint8_t* scales, int64_t unit, int part) {
    return load_half(scales + unit * SCALE_BYTES + 32 + part * 2 * LANES);
  }
  static void put_scales(uint8_t* scales, int64_t unit, int64_t output, const uint8_t* stored) {
    copy_half(scales + unit * SCALE_BYTES, stored, output);
    if (MINIMA) copy_half(scales + unit * SCALE_BYTES + 32, stored + 2, output);
  }
};

struct Q4_0 : Simple<4, 8, false> {
  static constexpr int64_t STORED = 32, STORED_BYTES = 18;
  static void unpack(const uint8_t* stored, uint8_t* quants) { nibbles(stored + 2, quants); }
  static void nibbles(const uint8_t* packed, uint8_t* quants) {
    for (int i = 0; i < 16; ++i) {
      quants[i] = packed[i] & 15;
      quants[i + 16] = packed[i] >> 4;
    }
  }
};
struct Q4_1 : Simple<4, 0, true> {
  static constexpr int64_t STORED = 32, STORED_BYTES = 20;
  static void unpack(const uint8_t* stored, uint8_t* quants) { Q4_0::nibbles(stored + 4, quants); }
};
struct Q5_0 : Simple<5, 16, false> {
  static constexpr int64_t STORED = 32, STORED_BYTES = 22;
  static void unpack(const uint8_t* stored, uint8_t* quants) { five_bits(stored + 2, quants); }
  static void five_bits(const uint8_t* packed, uint8_t* quants) {
    Q4_0::nibbles(packed + 4, quants);
    for (int i = 0; i < 32; ++i) quants[i] |= uint8_t((packed[i / 8] >> i % 8 & 1) << 4);
  }
};
struct Q5_1 : Simple<5, 0, true> {
  static constexpr int64_t STORED = 32, STORED_BYTES = 24;
  static void unpack(const uint8_t* stored, uint8_t* quants) { Q5_0::five_bits(stored + 4, quants); }
};
struct Q8_0 : Simple<8, 128, false> {
  static constexpr int64_t STORED = 32, STORED_BYTES = 34;
  static void unpack(const uint8_t* stored, uint8_t* quants) {
    for (int i = 0; i < 32; ++i) quants[i] = stored[2 + i] ^ 128;
  }
};

// Blocks of 8 units with float16 scales of scales.
template <int BITS>
struct SuperBlocks : Packed<BITS, 0, true> {
  static constexpr int64_t STORED = 256, SCALE_BYTES = 64 + 8 * 32;

  static int64_t scale_bytes(int64_t units) { return units / 8 * SCALE_BYTES; }
  static Vec scale(const uint8_t* scales, int64_t unit, int, int part) {
    const uint8_t* super = scales + unit / 8 * SCALE_BYTES;
    return load_half(super + part * 2 * LANES) * load_unsigned_bytes(super + 64 + unit % 8 * 32 + part * LANES);
  }
  static Vec minimum(const uint8_t* scales, int64_t unit, int part) {
    const uint8_t* super = scales + unit / 8 * SCALE_BYTES;
    return -(load_half(super + 32 + part * 2 * LANES) * load_unsigned_bytes(super + 80 + unit % 8 * 32 + part * LANES));
  }
  static void put_scales(uint8_t* scales, int64_t unit, int64_t output, const uint8_t* stored) {
    uint8_t* super = scales + unit / 8 * SCALE_BYTES;
    copy_half(super, stored, output);
    copy_half(super + 32, stored + 2, output);
    const uint8_t* six_bits = stored + 4;
    for (int i = 0; i < 8; ++i) {
      uint8_t* target = super + 64 + i * 32 + output;
      target[0] = uint8_t(i < 4 ? six_bits[i] & 63 : (six_bits[i + 4] & 15) | six_bits[i - 4] >> 6 << 4);
      target[16] = uint8_t(i < 4 ? six_bits[i + 4] & 63 : six_bits[i + 4] >> 4 | six_bits[i] >> 6 << 4);
    }
  }
};
struct Q4_K : SuperBlocks<4> {
  static constexpr int64_t STORED_BYTES = 144;
  static void unpack(const uint8_t* stored, uint8_t* quants) { nibbles(stored + 16, quants); }
  static void nibbles(const uint8_t* packed, uint8_t* quants) {
    for (int i = 0; i < 128; ++i) {
      quants[i / 32 * 64 + i % 32] = packed[i] & 15;
      quants[i / 32 * 64 + 32 + i % 32] = packed[i] >> 4;
    }
  }
};
struct Q5_K : SuperBlocks<5> {
  static constexpr int64_t STORED_BYTES = 176;
  static void unpack(const uint8_t* stored, uint8_t* quants) {
    Q4_K::nibbles(stored + 48, quants);
    for (int i = 0; i < 256; ++i) quants[i] |= uint8_t((stored[16 + i % 32] >> i / 32 & 1) << 4);
  }
};
struct Q6_K : Packed<6, 32, false, 2> {
  static constexpr int64_t STORED = 256, STORED_BYTES = 210, SCALE_BYTES = 32 + 16 * 16;

  static int64_t scale_bytes(int64_t units) { return units / 8 * SCALE_BYTES; }
  static Vec scale(const uint8_t* scales, int64_t unit, int block, int part) {
    const uint8_t* super = scales + unit / 8 * SCALE_BYTES;
    return load_half(super + part * 2 * LANES) *
           load_signed_bytes(super + 32 + (unit % 8 * 2 + block) * 16 + part * LANES);
  }
  static void put_scales(uint8_t* scales, int64_t unit, int64_t output, const uint8_t* stored) {
    uint8_t* super = scales + unit / 8 * SCALE_BYTES;
    copy_half(super, stored + 208, output);
    for (int i = 0; i < 16; ++i) super[32 + i * 16 + output] = stored[192 + i];
  }
  static void unpack(const uint8_t* stored, uint8_t* quants) {
    for (int i = 0; i < 256; ++i) {
      const int half = i / 128, quarter = i % 128 / 32, l = i % 32;
      const int low = stored[half * 64 + quarter % 2 * 32 + l] >> quarter / 2 * 4 & 15;
      quants[i] = uint8_t(low | (stored[128 + half * 32 + l] >> 2 * quarter & 3) << 4);
    }
  }
};

// 8 bits with a float32 scale for each output, which is stored apart.
struct Int8 : Packed<8, 128, false, 1, true> {
  static constexpr int64_t STORED = 32, STORED_BYTES = 32;
  static int64_t scale_bytes(int64_t) { return 64; }
  static Vec scale(const uint8_t*, int64_t, int, int) { return splat(1.0f); }
  static Vec output_scale(const uint8_t* scales, int part) {
    return load(reinterpret_cast<const float*>(scales) + part * LANES);
  }
  static void put_scales(uint8_t*, int64_t, int64_t, const uint8_t*) {}
  static void unpack(const uint8_t* stored, uint8_t* quants) {
    for (int i = 0; i < 32; ++i) quants[i] = stored[i] ^ 128;
  }
};

// Codes of four bits that stand for numbers of a table (here with 12 added), and a power of two for each unit.
struct Mxfp4 : Packed<4, 12, false> {
  static constexpr int64_t STORED = 32, STORED_BYTES = 17;
  static constexpr uint8_t NUMBERS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

  template <int GROUP>
  static ByteVec group(const uint8_t* unit, int part) {
    return look_up(NUMBERS, Quants<4>::group<GROUP>(unit, part));
  }
  static uint8_t get(const uint8_t* unit, int64_t output, int64_t k) {
    return NUMBERS[Quants<4>::get(unit, output, k)];
  }
  static int64_t scale_bytes(int64_t units) { return units * OUTPUTS; }
  static Vec scale(const uint8_t* scales, int64_t unit, int, int part) {
    const Vec exponent = load_unsigned_bytes(scales + unit * OUTPUTS + part * LANES);
    const IntVec e = __builtin_convertvector(exponent, IntVec);
    return (Vec)(e < 2 ? 0x200000 * (e + 1) : (e - 1) << 23);  // 2^(e - 128), the smallest as denormals
  }
  static void put_scales(uint8_t* scales, int64_t unit, int64_t output, const uint8_t* stored) {
    scales[unit * OUTPUTS + output] = stored[0];
  }
  static void unpack(const uint8_t* stored, uint8_t* quants) { Q4_0::nibbles(stored + 1, quants); }
};

#define QUIRE_FORMATS Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, Int8, Mxfp4  // as in `functions.py`
template <class... Formats>
struct FormatList {};

template <class Body, class... Formats>
inline void with_format(int64_t format, Body body, FormatList<Formats...>) {
  int64_t number = 0;
  (void)((number++ == format && (body(Formats{}), true)) || ...);
}

// Calls body with a value of the type of the format that has this number.
template <class Body>
inline void with_format(int64_t format, Body body) {
  with_format(format, body, FormatList<QUIRE_FORMATS>{});
}

template <class F>
struct PanelShape {
  int64_t units;
  int64_t quant_bytes() const { return units * F::UNIT_BYTES; }
  int64_t bytes() const { return (quant_bytes() + F::scale_bytes(units) + 63) / 64 * 64; }
};

}  // namespace quire
