// Sums of products of 8-bit integers, four at a time, on every instruction set: the same integers everywhere.
//
// One vector of bytes holds, for each of LANES outputs, four weights that follow each other along K. Weights are
// unsigned. Those of fewer than 8 bits stay below 64; those of 8 bits are stored with 128 added, but for machines that
// multiply signed numbers with each other.
#pragma once

#include "simd.h"

namespace quire {

typedef uint8_t ByteVec __attribute__((vector_size(LANES * 4)));

inline ByteVec load_bytes(const uint8_t* p) {
  ByteVec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Whether weights of less than 8 bits may be negative.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool SIGNED_DOT = true;
#else
constexpr bool SIGNED_DOT = false;
#endif

// 16 numbers of x, of which `four<I>` hands numbers 4 * I .. 4 * I + 3 to every output.
#if defined(__ARM_FEATURE_DOTPROD)
struct Sixteen {
  int8x16_t numbers;
  explicit Sixteen(const int8_t* x) : numbers(vld1q_s8(x)) {}
};
#else
struct Sixteen {
  const int8_t* numbers;
  explicit Sixteen(const int8_t* x) : numbers(x) {}
  template <int I>
  IntVec four() const {
    int32_t bits;
    std::memcpy(&bits, numbers + 4 * I, 4);
    return bits - IntVec{};
  }
};
#endif

#if defined(__AVX512VNNI__)
constexpr int32_t BIAS = 128;  // what weights of 8 bits still have too much when they are multiplied
#else
constexpr int32_t BIAS = 0;
#endif

#if !defined(__ARM_FEATURE_DOTPROD)
#if !defined(__AVX2__)
__attribute__((noinline)) static  // a loop over bytes, which would be written out hundreds of times
#else
inline
#endif
IntVec dot_small(IntVec sums, ByteVec weights, IntVec x) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif defined(__AVX512BW__)
  __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)x);
  return sums + (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVXVNNI__) && defined(__AVX2__)
  return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)x);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)x);
  return sums + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  typedef int8_t SignedBytes __attribute__((vector_size(LANES * 4)));
  SignedBytes a = (SignedBytes)weights, b = (SignedBytes)x;
  for (int i = 0; i < 4 * LANES; ++i) sums[i / 4] += int32_t(a[i]) * b[i];
  return sums;
#endif
}

// Weights of 8 bits: adds (weight - 128 + BIAS) * x.
QUIRE_STAND_IN IntVec dot_large(IntVec sums, ByteVec weights, IntVec x) {
#if defined(__AVX512VNNI__)
  return dot_small(sums, weights, x);
#else
  ByteVec centred = weights ^ uint8_t(128);  // as signed numbers
#if defined(__AVX512BW__)
  // The instruction takes one unsigned side: the sign goes over to x, which is never -128.
  __m512i moved = _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)centred), _mm512_setzero_si512(),
                                       (__m512i)x);
  return dot_small(sums, (ByteVec)_mm512_abs_epi8((__m512i)centred), (IntVec)moved);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256i moved = _mm256_sign_epi8((__m256i)x, (__m256i)centred);
  return dot_small(sums, (ByteVec)_mm256_abs_epi8((__m256i)centred), (IntVec)moved);
#else
  return dot_small(sums, centred, x);
#endif
#endif
}
#endif

// Adds to each output's sum the products of its four weights with numbers 4 * I .. 4 * I + 3 of x.
template <bool IS_LARGE, int I>
inline IntVec dot(IntVec sums, ByteVec weights, const Sixteen& x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return (IntVec)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)weights, x.numbers, I);
#else
  return IS_LARGE ? dot_large(sums, weights, x.four<I>()) : dot_small(sums, weights, x.four<I>());
#endif
}

// For each byte of `index`, all below 16, that of the table.
QUIRE_STAND_IN ByteVec look_up(const uint8_t* table, ByteVec index) {
#if defined(__AVX512BW__)
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (ByteVec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), (__m512i)index);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (ByteVec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(all), (__m256i)index);
#elif defined(__aarch64__)
  return (ByteVec)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)index);
#else
  for (int i = 0; i < 4 * LANES; ++i) index[i] = table[index[i]];
  return index;
#endif
}

// float16 to float32, LANES of them.
QUIRE_STAND_IN Vec load_half(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  uint16x4_t half;
  std::memcpy(&half, p, sizeof half);
  return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(half));
#else
  Vec result;
  for (int i = 0; i < LANES; ++i) {
    uint16_t half;
    std::memcpy(&half, p + 2 * i, 2);
    // Shifted into place, the number is 2^112 too small, denormal or not; the largest exponent stands for infinity.
    uint32_t bits = uint32_t(half & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &bits, 4);
    value *= 5.192296858534828e33f;
    if ((half & 0x7c00) == 0x7c00) {
      bits |= 0x7f800000u;
      std::memcpy(&value, &bits, 4);
    }
    result[i] = half & 0x8000 ? -value : value;
  }
  return result;
#endif
}

inline Vec load_unsigned_bytes(const uint8_t* p) {
  typedef uint8_t Quarter __attribute__((vector_size(LANES)));
  Quarter bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
}

inline Vec load_signed_bytes(const uint8_t* p) {
  typedef int8_t Quarter __attribute__((vector_size(LANES)));
  Quarter bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
}

}  // namespace quire
