// One vector type of the machine's full width, float and bfloat16 loads and stores, and exp.
//
// Numbers have the same bits on every instruction set: sums across lanes always have SUM_LANES of them, in as many
// vectors as that takes, products are fused where `fma` says so, and nothing is left to a library's exp.
// The files are compiled with -ffp-contract=off, so a product and a sum are fused exactly where `fma` is
// written. That is what keeps a row's bits the same in every loop the compiler unrolls differently.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Where no instruction fuses a product and a sum, `fma` is a call, for each lane a slow one: what contains such calls is
// then neither put into its callers nor written out several times. That would make nothing quicker, and compiling, which
// is half of what the first use takes there, twice as long.
#define QUIRE_PRAGMA(text) _Pragma(#text)
#if defined(__FMA__) || defined(__aarch64__)
#define QUIRE_STAND_IN inline
#define QUIRE_FMA_LOOP
#define QUIRE_UNROLL_BY(count) QUIRE_PRAGMA(GCC unroll count)
#else
#define QUIRE_STAND_IN __attribute__((noinline)) inline
#define QUIRE_FMA_LOOP QUIRE_PRAGMA(GCC unroll 1)
#define QUIRE_UNROLL_BY(count) QUIRE_FMA_LOOP
#endif

namespace quire {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

constexpr int SUM_LANES = 16;
constexpr int PER_SUM = SUM_LANES / LANES;  // vectors

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint32_t UIntVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));
typedef float VecInMemory __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

struct bf16 {
  uint16_t bits;
};

struct fp8 {  // e4m3: a sign, 4 bits of exponent, 3 of mantissa; no infinity
  uint8_t bits;
};

inline Vec splat(float value) { return value - Vec{}; }  // minus zero, which changes no number and costs nothing

QUIRE_STAND_IN Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int i = 0; i < LANES; ++i) a[i] = __builtin_fmaf(a[i], b[i], c[i]);  // slow where it is a function, but the same
  return a;
#endif
}

// Where one is NaN, it may be either.
inline Vec maximum(Vec a, Vec b) {
#if defined(__aarch64__)
  return (Vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
  return a > b ? a : b;
#endif
}

// Sums the lanes in halves: always the same tree.
inline float sum_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
#endif
}

// PER_SUM vectors of partial sums become one, in the same tree.
inline Vec fold_vectors(const Vec* sums) {
  if constexpr (PER_SUM == 4) return (sums[0] + sums[2]) + (sums[1] + sums[3]);
  if constexpr (PER_SUM == 2) return sums[0] + sums[1];
  return sums[0];
}

inline float max_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(__aarch64__)
  return vmaxvq_f32((float32x4_t)v);
#else
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
#endif
}

// Of whole numbers.
inline int32_t sum_lanes(IntVec v) {
#if defined(__aarch64__)
  return vaddvq_s32((int32x4_t)v);
#elif defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int i = 0; i < LANES; ++i) sum += v[i];
  return sum;
#endif
}
inline int32_t max_lanes(IntVec v) {
#if defined(__aarch64__)
  return vmaxvq_s32((int32x4_t)v);
#elif defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t top = v[0];
  for (int i = 1; i < LANES; ++i) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

// Whole numbers between -128 and 127 as bytes.
inline void store_bytes(int8_t* p, IntVec v) {
#if defined(__aarch64__)
  const int16x4_t half = vmovn_s32((int32x4_t)v);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(half, half));  // GCC would take the vector apart
  std::memcpy(p, &bytes, LANES);
#else
  typedef int8_t Narrow __attribute__((vector_size(LANES)));
  const Narrow bytes = __builtin_convertvector(v, Narrow);
  std::memcpy(p, &bytes, sizeof bytes);
#endif
}

// Pairs of bfloat16 in 32 bits: the first one is the low half.
inline Vec low_bf16(UIntVec pair) { return (Vec)(pair << 16); }
inline Vec high_bf16(UIntVec pair) { return (Vec)(pair & 0xffff0000u); }

inline float to_float(bf16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline Vec load(const float* p) { return *reinterpret_cast<const VecInMemory*>(p); }

inline Vec load(const bf16* p) {
  HalfVec half;
  std::memcpy(&half, p, sizeof half);
#if defined(__AVX512F__)
  return low_bf16((UIntVec)_mm512_cvtepu16_epi32((__m256i)half));
#elif defined(__aarch64__)
  return (Vec)vshll_n_u16((uint16x4_t)half, 16);  // GCC would take the vector apart
#else
  return low_bf16(__builtin_convertvector(half, UIntVec));
#endif
}

QUIRE_STAND_IN Vec load(const int8_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(__aarch64__)
  uint32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bytes)))));
#else
  Vec v;
  for (int i = 0; i < LANES; ++i) v[i] = p[i];
  return v;
#endif
}

QUIRE_STAND_IN IntVec load_whole(const uint8_t* p) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__) && defined(__FMA__)
  return (IntVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  uint32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return (IntVec)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
#else
  IntVec v;
  for (int i = 0; i < LANES; ++i) v[i] = p[i];
  return v;
#endif
}

// Without denormal floats, which are slow on some machines: a denormal FP8 number is one with the least exponent, less
// what its mantissa has too much then.
QUIRE_STAND_IN Vec load(const fp8* p) {
  const IntVec byte = load_whole(&p->bits), size = byte & 0x7f;
  const IntVec denormal = size < 8;  // all bits set, or none
  const Vec excess = (Vec)(denormal & (121 << 23));  // 2^-6
  const Vec number = (Vec)((size << 20) + (120 << 23) - (denormal << 23)) - excess;
  return (Vec)((IntVec)number | (byte & 0x80) << 24 | ((IntVec)(size == 0x7f) & 0x7fc00000));
}

inline void store(float* p, Vec v) { *reinterpret_cast<VecInMemory*>(p) = v; }

// To nearest, ties to even; a NaN stays one.
inline void store(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
  __m256bh half = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &half, sizeof half);
#else
  UIntVec bits = (UIntVec)v;
  UIntVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  UIntVec quiet = (bits >> 16) | 0x40u;
  HalfVec half = __builtin_convertvector(v == v ? rounded : quiet, HalfVec);
  std::memcpy(p, &half, sizeof half);
#endif
}

// To nearest, ties to even; what is too large becomes the largest, a NaN stays one.
QUIRE_STAND_IN void store(fp8* p, Vec v) {
  const IntVec bits = (IntVec)v;
  const Vec positive = (Vec)(bits & 0x7fffffff), size = positive > 448.0f ? splat(448.0f) : positive;
  const IntVec wide = (IntVec)size, rounded = ((wide + 0x7ffff + ((wide >> 20) & 1)) >> 20) - (120 << 3);
  const IntVec denormal = (IntVec)(size + 16384.0f) & 0xf;  // beside 2^14 nothing finer than 2^-9 is left
  const IntVec number = size < 0.015625f ? denormal : v == v ? rounded : 0x7f + IntVec{};
  const IntVec byte = number | ((bits >> 24) & 0x80);
  for (int i = 0; i < LANES; ++i) p[i].bits = uint8_t(byte[i]);
}

// LANES elements, or `count` if that is less: zeros come in for the rest, nothing is read or written past them.
template <class T>
inline Vec read(const T* p, int64_t count) {
  if (count >= LANES) return load(p);
  T padded[LANES] = {};
  std::memcpy(padded, p, size_t(count) * sizeof(T));
  return load(padded);
}

template <class T>
inline void write(T* p, Vec v, int64_t count) {
  if (count >= LANES) return store(p, v);
  T padded[LANES];
  store(padded, v);
  std::memcpy(p, padded, size_t(count) * sizeof(T));
}

// The value after a round trip through T: where the reference rounds in the middle of an operation.
template <class T>
inline Vec round_to(Vec v) {
  T rounded[LANES];
  store(rounded, v);
  return load(rounded);
}
template <>
inline Vec round_to<float>(Vec v) { return v; }

inline Vec round_to_whole(Vec v) {
#if defined(__AVX512F__)
  return (Vec)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: nothing after the point is left beside it
  return (v + shift) - shift;
#endif
}

// v * 2^whole, for v near 1 and a result that is no denormal.
inline Vec scale_by_power(Vec v, Vec whole) {
#if defined(__AVX512F__)
  return (Vec)_mm512_scalef_ps((__m512)v, (__m512)whole);
#else
  return v * (Vec)((__builtin_convertvector(whole, IntVec) + 127) << 23);
#endif
}

// The terms of a series for 2^r, once for each lane, times 1 or 1/2.
struct PowerSeries {
  static constexpr int TERMS = 7;
  alignas(64) float terms[TERMS][LANES];
  constexpr explicit PowerSeries(float factor) : terms() {
    constexpr float numbers[TERMS] = {0.00015353362f, 0.0013398875f, 0.00961843692f, 0.0555033237f,
                                      0.240226477f,   0.693147182f,  1.0f};
    for (int i = 0; i < TERMS; ++i)
      for (int lane = 0; lane < LANES; ++lane) terms[i][lane] = factor * numbers[i];
  }
};
inline constexpr PowerSeries POWERS(1.0f), HALF_POWERS(0.5f);

// A constant to add a product to. ARM's fused products overwrite what they add to: a copy of a register would take the
// place of a product, and a load does not, so it is loaded every time.
inline Vec addend(const float* numbers) {
#if defined(__aarch64__)
  Vec v;
  asm volatile("ldr %q0, %1" : "=w"(v) : "m"(*reinterpret_cast<const float(*)[4]>(numbers)));
  return v;
#else
  return load(numbers);
#endif
}

// 2^r for r in [-1/2, 1/2], to one unit in the last place and exactly 1 for 0.
QUIRE_STAND_IN Vec power_of_fraction(Vec r) {
  Vec series = load(POWERS.terms[0]);
  for (int i = 1; i < PowerSeries::TERMS; ++i) series = fma(series, r, addend(POWERS.terms[i]));
  return series;
}

// 2^x for x <= 0: exactly 1 for 0, exactly 0 below -126 and for minus infinity. Of COUNT vectors, each operation for all of
// them before the next one: in one alone every operation waits for the one before.
template <int COUNT>
QUIRE_STAND_IN void exp2_of_negative(Vec (&x)[COUNT]) {
#if defined(__AVX512F__)
  for (int i = 0; i < COUNT; ++i) {
    Vec whole = round_to_whole(x[i]);
    Vec result = scale_by_power(power_of_fraction(x[i] - whole), whole);
    x[i] = x[i] < -126.0f ? Vec{} : result;
  }
#else
  // As `round_to_whole`, but the last bits of `shifted` are those of x + 128: shifted to where exponents are, 2^(x + 1).
  const Vec shift = splat(12582912.0f + 128.0f);
  Vec shifted[COUNT], series[COUNT];
  QUIRE_UNROLL_BY(4)
  for (int i = 0; i < COUNT; ++i) x[i] = x[i] < -126.0f ? splat(-128.0f) : x[i];  // times 0 then
  QUIRE_UNROLL_BY(4)
  for (int i = 0; i < COUNT; ++i) shifted[i] = x[i] + shift;
  QUIRE_UNROLL_BY(4)
  for (int i = 0; i < COUNT; ++i) x[i] = x[i] - (shifted[i] - shift);
  QUIRE_UNROLL_BY(4)
  for (int i = 0; i < COUNT; ++i) series[i] = load(HALF_POWERS.terms[0]);
  QUIRE_UNROLL_BY(8)
  for (int term = 1; term < PowerSeries::TERMS; ++term)
    QUIRE_UNROLL_BY(4)
    for (int i = 0; i < COUNT; ++i) series[i] = fma(series[i], x[i], addend(HALF_POWERS.terms[term]));
  QUIRE_UNROLL_BY(4)
  for (int i = 0; i < COUNT; ++i) x[i] = series[i] * (Vec)((IntVec)shifted[i] << 23);
#endif
}
inline Vec exp2_of_negative(Vec x) {
  Vec one[1] = {x};
  exp2_of_negative(one);
  return one[0];
}

// e^x to about one unit in the last place; 0 below -87.3 and infinity above 87.9.
QUIRE_STAND_IN Vec exp(Vec x) {
  Vec inside = x < -87.3f ? splat(-87.3f) : x;
  inside = inside > 87.9f ? splat(87.9f) : inside;
  Vec whole = round_to_whole(inside * 1.44269502f);
  // x - whole * ln(2) in two parts, the first of which is exact with or without fused products.
  Vec r = fma(whole, splat(-0.693359375f), inside);
  r = fma(whole, splat(2.12194440e-4f), r) * 1.44269502f;
  Vec result = scale_by_power(power_of_fraction(r), whole);
  result = x < -87.3f ? Vec{} : result;
  return x > 87.9f ? splat(std::numeric_limits<float>::infinity()) : result;
}

// cap * tanh(x / cap), by e^(-2|x| / cap), which is at most 1.
QUIRE_STAND_IN Vec soft_capped(Vec x, float cap) {
  const Vec decayed = exp((x < 0.0f ? x : -x) * (2.0f / cap));
  const Vec size = cap * (1.0f - decayed) / (1.0f + decayed);
  return x < 0.0f ? -size : size;
}

}  // namespace quire
