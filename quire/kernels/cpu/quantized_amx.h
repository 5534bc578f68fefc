// How one block's integer sums join an output, and the products of many rows with tile instructions.
#pragma once

#include "amx.h"
#include "quantized.h"

namespace quire {

// Rows of x as integers.
struct QuantizedRows {
  const int8_t* quants;      // [rows][depth]
  const float* scales;       // [rows][units]
  const float* scaled_sums;  // [rows][units]: scale times the sum of the unit's integers
  const int32_t* sums;       // [rows][2 * units]: of each 16 integers
  int64_t units;
};

// Sums of integers begin at these bits, minus what all weights have too much: read as a float they are then 1.5 * 2^23
// plus the sum, exactly. That is cheaper than a conversion.
constexpr int32_t MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;

template <class F>
inline int32_t first_sum(int32_t zero, const QuantizedRows& x, int64_t row, int64_t unit, int block) {
  if constexpr (F::MINIMA || (F::IS_LARGE && BIAS == 0)) return MAGIC_BITS;
  const int32_t* sums = x.sums + 2 * (row * x.units + unit);
  return MAGIC_BITS - zero * (F::BLOCKS == 1 ? sums[0] + sums[1] : sums[block]);
}

template <class F>
inline Vec merge(Vec total, IntVec sums, Vec scale, Vec minimum, const QuantizedRows& x, int64_t row, int64_t unit) {
  const int64_t at = row * x.units + unit;
  total = fma(scale * x.scales[at], (Vec)sums - MAGIC, total);
  if constexpr (F::MINIMA) total = fma(splat(x.scaled_sums[at]), minimum, total);
  return total;
}

#if defined(__AMX_INT8__) && defined(QUIRE_HAS_AMX) && defined(__AVX512VNNI__)
#define QUIRE_HAS_AMX_INT8 1

// A block's 16 x 16 sums are one tile product. They pass through memory on their way to the vector registers, four
// blocks at a time, so that what is loaded was stored a while ago.
template <class F, class Panel>
void rows_by_tiles(const Panel& panel, const QuantizedRows& x, int64_t first_row, int64_t rows, float* totals) {
  constexpr int AT_ONCE = 4, DEPTH = int(UNIT) / F::BLOCKS;
  const int64_t blocks = x.units * F::BLOCKS, stride = x.units * UNIT;
  for (int64_t row = 0; row < rows; row += 16) {
    const int count = int(rows - row < 16 ? rows - row : 16);
    TileConfig config;
    for (int tile = 0; tile < AT_ONCE; ++tile) config.set(tile, count, 64);
    config.set(4, count, DEPTH);
    config.set(5, DEPTH / 4, 64);
    config.use();
    alignas(64) int32_t sums[AT_ONCE][16][16];
    Vec total[16] = {};
    const int8_t* quants = x.quants + (first_row + row) * stride;
    for (int64_t block = 0; block < blocks; block += AT_ONCE) {
      unrolled<AT_ONCE>([&](auto i) __attribute__((always_inline)) {
        if (block + i() >= blocks) return;
        tile_zero<i()>();
        tile_load<4>(quants + (block + i()) * DEPTH, stride);
        tile_load<5>(panel.quants + (block + i()) * DEPTH * OUTPUTS, 64);
        tile_product_signed_unsigned<i(), 4, 5>();
        tile_store<i()>(sums[i()], 64);
      });
      for (int i = 0; i < AT_ONCE && block + i < blocks; ++i) {
        const int64_t unit = (block + i) / F::BLOCKS;
        const int part = int((block + i) % F::BLOCKS);
        const Vec scale = panel.scale(unit, part, 0);
        Vec minimum = {};
        if constexpr (F::MINIMA) minimum = panel.minimum(unit, 0);
        for (int r = 0; r < count; ++r) {
          IntVec whole;
          std::memcpy(&whole, sums[i][r], sizeof whole);
          whole += first_sum<F>(panel.zero, x, first_row + row + r, unit, part);
          total[r] = merge<F>(total[r], whole, scale, minimum, x, first_row + row + r, unit);
        }
      }
    }
    for (int r = 0; r < count; ++r) store(totals + (row + r) * OUTPUTS, total[r]);
  }
  tile_release();
}
#endif

}  // namespace quire
