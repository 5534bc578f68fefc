// Products of rows with one panel: with vector instructions, or tile instructions where there are many rows.
// What is in here is compiled in two files, since each format has code of its own.
#pragma once

#include "amx.h"
#include "quantized.h"
#include "threads.h"

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

// Weights as they lie in memory.
template <class F>
struct PackedPanel {
  const uint8_t *quants, *scales;
  static constexpr int32_t zero = F::IS_LARGE ? BIAS : F::ZERO;

  template <int GROUP>
  ByteVec group(int64_t unit, int part) const {
    return F::template group<GROUP>(quants + unit * F::UNIT_BYTES, part);
  }
  Vec scale(int64_t unit, int block, int part) const { return F::scale(scales, unit, block, part); }
  Vec minimum(int64_t unit, int part) const { return F::minimum(scales, unit, part); }

  // Asks for the same unit of the panel behind, which the same thread takes most of the time: quants and scales are two
  // short streams that begin anew with each panel, and the machine alone finds out about them too late. Into the second
  // level: from the first, prefetches so far ahead take half of the memory's speed on a Neoverse-N1.
  void ask_ahead(int64_t unit, int64_t units) const {
#if defined(__aarch64__)
    const int64_t lines = (F::UNIT_BYTES + F::scale_bytes(8) / 8 + 63) / 64;
    const uint8_t* later = quants + PanelShape<F>{units}.bytes() + unit * lines * 64;
    QUIRE_UNROLL for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(later + i * 64, 0, 2);
#else
    (void)unit, (void)units;
#endif
  }
};

// The same taken apart once for many rows: bytes, and scales in float32.
template <class F>
struct ExpandedPanel {
  const uint8_t* quants;
  const float *scales, *minima;
  int32_t zero;

  template <int GROUP>
  ByteVec group(int64_t unit, int part) const {
    return load_bytes(quants + unit * 512 + GROUP * 64 + part * 4 * LANES);
  }
  Vec scale(int64_t unit, int block, int part) const {
    return load(scales + (unit * F::BLOCKS + block) * OUTPUTS + part * LANES);
  }
  Vec minimum(int64_t unit, int part) const { return load(minima + unit * OUTPUTS + part * LANES); }
  void ask_ahead(int64_t, int64_t) const {}

  static size_t bytes(int64_t units) { return size_t(units * (512 + (F::BLOCKS + 1) * OUTPUTS * 4)); }
};

template <class F>
ExpandedPanel<typename F::Kind> expand(const PackedPanel<F>& packed, int64_t units, uint8_t* memory) {
  float* scales = reinterpret_cast<float*>(memory + units * 512);
  float* minima = scales + units * F::BLOCKS * OUTPUTS;
  for (int64_t unit = 0; unit < units; ++unit) {
    packed.ask_ahead(unit, units);
    for (int part = 0; part < PER; ++part) {
      if constexpr (!F::IS_LARGE)
        unrolled<8>([&](auto group) {
          ByteVec bytes = packed.template group<group()>(unit, part);
          std::memcpy(memory + unit * 512 + group() * 64 + part * 4 * LANES, &bytes, sizeof bytes);
        });
      for (int block = 0; block < F::BLOCKS; ++block)
        store(scales + (unit * F::BLOCKS + block) * OUTPUTS + part * LANES, packed.scale(unit, block, part));
      if constexpr (F::MINIMA) store(minima + unit * OUTPUTS + part * LANES, packed.minimum(unit, part));
    }
  }
  return {F::IS_LARGE ? packed.quants : memory, scales, minima, packed.zero};
}

constexpr int MAX_ROWS = LANES == 16 ? 8 : 4;    // rows whose sums fit the registers
constexpr int PACKED_ROWS = LANES == 4 ? 4 : 2;  // for so many, taking a panel apart first costs more than it saves

// totals[row][16] of ROWS rows. Everything is unrolled: the sums must stay in registers.
template <class F, int ROWS, class Panel>
void some_rows(const Panel& panel, const QuantizedRows& x, int64_t first_row, float* totals) {
  const int8_t* quants[ROWS];
  for (int r = 0; r < ROWS; ++r) quants[r] = x.quants + (first_row + r) * x.units * UNIT;
  Vec total[ROWS][PER] = {};
  for (int64_t unit = 0; unit < x.units; ++unit) {
    panel.ask_ahead(unit, x.units);
    unrolled<F::BLOCKS>([&](auto block) __attribute__((always_inline)) {
      IntVec sums[ROWS][PER];
      QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
        const IntVec first = first_sum<F>(panel.zero, x, first_row + r, unit, block()) - IntVec{};
        QUIRE_UNROLL for (int p = 0; p < PER; ++p) sums[r][p] = first;
      }
      unrolled<8 / F::BLOCKS>([&](auto i) __attribute__((always_inline)) {
        constexpr int GROUP = i() + 4 * block();
        ByteVec weights[PER];
        QUIRE_UNROLL for (int p = 0; p < PER; ++p) weights[p] = panel.template group<GROUP>(unit, p);
        QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
          const Sixteen numbers(quants[r] + unit * UNIT + GROUP / 4 * 16);
          QUIRE_UNROLL for (int p = 0; p < PER; ++p)
            sums[r][p] = dot<F::IS_LARGE, GROUP % 4>(sums[r][p], weights[p], numbers);
        }
      });
      QUIRE_UNROLL for (int p = 0; p < PER; ++p) {
        Vec minimum = {};
        const Vec scale = panel.scale(unit, block(), p);
        if constexpr (F::MINIMA) minimum = panel.minimum(unit, p);
        QUIRE_UNROLL for (int r = 0; r < ROWS; ++r)
          total[r][p] = merge<F>(total[r][p], sums[r][p], scale, minimum, x, first_row + r, unit);
      }
    });
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PER; ++p) store(totals + r * OUTPUTS + p * LANES, total[r][p]);
}

template <class F, class Panel, int ROWS>
void up_to_rows(int64_t rows, const Panel& panel, const QuantizedRows& x, int64_t first_row, float* totals) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return up_to_rows<F, Panel, ROWS - 1>(rows, panel, x, first_row, totals);
  }
  some_rows<F, ROWS>(panel, x, first_row, totals);
}

#if defined(__AMX_INT8__) && defined(QUIRE_HAS_AMX) && defined(__AVX512VNNI__)
#define QUIRE_HAS_AMX_INT8 1

// A block's 16 x 16 sums are one tile product. They pass through memory on their way to the vector registers, four
// blocks at a time, so that what is loaded was stored a while ago.
template <class F>
void rows_by_tiles(const ExpandedPanel<F>& panel, const QuantizedRows& x, int64_t first_row, int64_t rows,
                   float* totals) {
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

// totals[row][16] of rows [first_row, first_row + rows) of x: sums over all units, before bias and scales of outputs.
template <class F>
void panel_totals(const uint8_t* data, const QuantizedRows& x, int64_t first_row, int64_t rows, bool use_amx,
                  float* totals) {
  const PackedPanel<F> packed{data, data + PanelShape<F>{x.units}.quant_bytes()};
  if (rows <= PACKED_ROWS) return up_to_rows<F, PackedPanel<F>, PACKED_ROWS>(rows, packed, x, first_row, totals);
  thread_local Scratch scratch;
  using Kind = typename F::Kind;
  using Panel = ExpandedPanel<Kind>;
  const Panel panel = expand(packed, x.units, scratch.get<uint8_t>(Panel::bytes(x.units)));
#if defined(QUIRE_HAS_AMX_INT8)
  if (use_amx && rows > 4) return rows_by_tiles(panel, x, first_row, rows, totals);
#else
  (void)use_amx;
#endif
  for (int64_t row = 0; row < rows; row += MAX_ROWS)
    up_to_rows<Kind, Panel, MAX_ROWS>(rows - row, panel, x, first_row + row, totals + row * OUTPUTS);
}

#define QUIRE_PANEL_TOTALS(F) \
  template void panel_totals<F>(const uint8_t*, const QuantizedRows&, int64_t, int64_t, bool, float*);
#define QUIRE_SIMPLE_FORMATS(each) each(Q4_0) each(Q4_1) each(Q5_0) each(Q5_1) each(Int8) each(Mxfp4)
#define QUIRE_OTHER_FORMATS(each) each(Q8_0) each(Q4_K) each(Q5_K) each(Q6_K)

}  // namespace quire
