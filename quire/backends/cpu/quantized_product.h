// Products of rows with one panel: with vector instructions, or tile instructions where there are many rows.
// What is in here is compiled in two files, since each format has code of its own.
#pragma once

#include <iterator>
#include <type_traits>

#include "amx.h"
#include "quantized.h"
#include "quantized_neon.h"
#include "threads.h"

namespace quire {

// Rows of x as integers.
struct QuantizedRows {
  const int8_t* quants;  // [rows][depth]
  const float* factors;  // [rows][units][2]: the unit's scale, and that times the sum of the unit's integers
  const int32_t* sums;   // [rows][2 * units]: of each 16 integers
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

// A unit's two factors of one row. LOADED, here and below: it comes by a single load where instructions take a number from
// any lane. A copy of a register, or of a number to all lanes, would take the place of a product, and a load does not.
template <bool LOADED>
struct Factors {
  float scale, scaled_sum;
  explicit Factors(const float* at) : scale(at[0]), scaled_sum(at[1]) {}
  Vec scaled(Vec weight_scale) const { return weight_scale * scale; }
  Vec plus_minimum(Vec total, Vec minimum) const { return fma(splat(scaled_sum), minimum, total); }
};

#if defined(__ARM_FEATURE_DOTPROD)
template <>
struct Factors<true> {
  float32x2_t both;
  explicit Factors(const float* at) {
    asm("ldr %d0, %1" : "=w"(both) : "m"(*reinterpret_cast<const float(*)[2]>(at)));
  }
  Vec scaled(Vec scale) const { return (Vec)vmulq_lane_f32((float32x4_t)scale, both, 0); }
  Vec plus_minimum(Vec total, Vec minimum) const {
    return (Vec)vfmaq_lane_f32((float32x4_t)total, (float32x4_t)minimum, both, 1);
  }
};
inline IntVec loaded_magic_bits() {
  alignas(16) static const int32_t bits[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
  IntVec sums;
  asm volatile("ldr %q0, %1" : "=w"(sums) : "m"(bits));
  return sums;
}
#else
inline IntVec loaded_magic_bits() { return MAGIC_BITS - IntVec{}; }
#endif

template <class F, bool LOADED>
inline Vec merge(Vec total, IntVec sums, Vec scale, Vec minimum, const Factors<LOADED>& x) {
  total = fma(x.scaled(scale), (Vec)sums - MAGIC, total);
  if constexpr (F::MINIMA) total = x.plus_minimum(total, minimum);
  return total;
}

// Weights as they lie in memory.
template <class F>
struct PackedPanel {
  static constexpr bool IS_PACKED = true;
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

// The same taken apart once for many rows: bytes, from which ZERO is subtracted where they may be signed, and scales in
// float32.
template <class F>
struct ExpandedPanel {
  static constexpr bool IS_PACKED = false;
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
      if constexpr (!F::IS_LARGE) {
        ByteVec bytes[8];  // all of them before the first is stored, which might be where others are loaded from
        unrolled<8>([&](auto group) {
          bytes[group()] = packed.template group<group()>(unit, part);
          if constexpr (SIGNED_DOT) bytes[group()] -= uint8_t(F::ZERO);
        });
        unrolled<8>([&](auto group) {
          std::memcpy(memory + unit * 512 + group() * 64 + part * 4 * LANES, &bytes[group()], sizeof(ByteVec));
        });
      }
      for (int block = 0; block < F::BLOCKS; ++block)
        store(scales + (unit * F::BLOCKS + block) * OUTPUTS + part * LANES, packed.scale(unit, block, part));
      if constexpr (F::MINIMA) store(minima + unit * OUTPUTS + part * LANES, packed.minimum(unit, part));
    }
  }
  return {F::IS_LARGE ? packed.quants : memory, scales, minima, SIGNED_DOT ? 0 : packed.zero};
}

// Rows whose sums fit the registers, and parts of a panel that are walked together with so many rows. Where vectors are
// short, few rows see the whole panel in one walk, as it lies in memory. More rows have sums and totals of one part in
// registers, so that what is loaded and taken apart is so for all of them; where there is nothing to take apart, fewer
// with more parts are quicker.
template <class F, class Panel>
constexpr int MAX_ROWS = LANES == 16 || (LANES == 4 && Panel::IS_PACKED && !F::IS_LARGE) ? 8 : 4;
template <class F, class Panel, int ROWS>
constexpr int PARTS = LANES != 4 || ROWS <= 2 || (F::IS_LARGE && Panel::IS_PACKED) ? PER : ROWS <= 4 ? 2 : 1;
// For so many, taking a panel apart first costs more than it saves.
template <class F>
constexpr int PACKED_ROWS = LANES != 4 ? 2 : !SIGNED_DOT ? 8 : std::is_same_v<F, Q4_1> || F::IS_LARGE ? 16 : 8;

// totals[row][16] of ROWS rows, of some parts of a panel. Everything is unrolled: the sums must stay in registers.
template <class F, int ROWS, class Panel>
__attribute__((noinline))  // among others' code the registers would not do
void some_parts(const Panel& panel, const QuantizedRows& x, int64_t first_row, int first_part, float* totals) {
  constexpr int PARTS = quire::PARTS<F, Panel, ROWS>;
  const int part = PARTS == PER ? 0 : first_part;
  constexpr bool LOADED = SIGNED_DOT && ROWS > 2;  // then all sums begin alike: ZERO is subtracted from the weights
  const int8_t* quants = x.quants + first_row * x.units * UNIT;
  const float* factors = x.factors + first_row * x.units * 2;
  Vec total[ROWS][PARTS] = {};
  for (int64_t unit = 0; unit < x.units; ++unit) {
    if (part == 0) panel.ask_ahead(unit, x.units);  // all in one walk, in the order of the memory
    unrolled<F::BLOCKS>([&](auto block) __attribute__((always_inline)) {
      IntVec sums[ROWS][PARTS];
      QUIRE_UNROLL for (int r = 0; r < ROWS; ++r)
        QUIRE_UNROLL for (int p = 0; p < PARTS; ++p)
          sums[r][p] = LOADED ? loaded_magic_bits()
                              : first_sum<F>(panel.zero, x, first_row + r, unit, block()) - IntVec{};
      unrolled<8 / F::BLOCKS>([&](auto i) __attribute__((always_inline)) {
        constexpr int GROUP = i() + 4 * block();
        ByteVec weights[PARTS];
        QUIRE_UNROLL for (int p = 0; p < PARTS; ++p) {
          weights[p] = panel.template group<GROUP>(unit, part + p);
          if constexpr (LOADED && Panel::IS_PACKED && !F::IS_LARGE) weights[p] -= uint8_t(panel.zero);
        }
        QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
          const Sixteen numbers(quants + (r * x.units + unit) * UNIT + GROUP / 4 * 16);
          QUIRE_UNROLL for (int p = 0; p < PARTS; ++p)
            sums[r][p] = dot<F::IS_LARGE, GROUP % 4>(sums[r][p], weights[p], numbers);
        }
      });
      Vec scale[PARTS], minimum[PARTS] = {};
      // Few rows go part by part: the next one's scales are loaded meanwhile.
      constexpr int OUTER = LOADED ? ROWS : PARTS, INNER = LOADED ? PARTS : ROWS;
      QUIRE_UNROLL for (int o = 0; o < OUTER; ++o)
        QUIRE_UNROLL for (int i = 0; i < INNER; ++i) {
          const int r = LOADED ? o : i, p = LOADED ? i : o;
          if (r == 0) scale[p] = panel.scale(unit, block(), part + p);
          if constexpr (F::MINIMA)
            if (r == 0) minimum[p] = panel.minimum(unit, part + p);
          const Factors<LOADED> own(factors + (r * x.units + unit) * 2);
          total[r][p] = merge<F>(total[r][p], sums[r][p], scale[p], minimum[p], own);
        }
    });
  }
  QUIRE_UNROLL for (int r = 0; r < ROWS; ++r)
    QUIRE_UNROLL for (int p = 0; p < PARTS; ++p) store(totals + r * OUTPUTS + (part + p) * LANES, total[r][p]);
}

template <class F, class Panel, int ROWS>
void up_to_rows(int64_t rows, const Panel& panel, const QuantizedRows& x, int64_t first_row, float* totals) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return up_to_rows<F, Panel, ROWS - 1>(rows, panel, x, first_row, totals);
  }
  for (int part = 0; part < PER; part += PARTS<F, Panel, ROWS>) some_parts<F, ROWS>(panel, x, first_row, part, totals);
}

#if defined(__ARM_FEATURE_DOTPROD)
alignas(16) constexpr int32_t FIRST_SUMS[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};

// Rows that have code of their own: totals of all parts, like `up_to_rows`; 0 where there is none for this panel.
template <class F, class Panel>
constexpr int OWN_ROWS = std::is_same_v<Panel, PackedPanel<Q4_1>>                                  ? 8
                         : !Panel::IS_PACKED && !F::IS_LARGE && F::MINIMA && F::BLOCKS == 1 ? 4
                                                                                            : 0;
template <class Call>
Call call_for(const QuantizedRows& x, int64_t first_row) {
  Call call;
  for (size_t r = 0; r < std::size(call.rows); ++r) {
    call.rows[r] = x.quants + (first_row + int64_t(r)) * x.units * UNIT;
    call.factors[r] = x.factors + (first_row + int64_t(r)) * x.units * 2;
  }
  call.units = x.units;
  call.first_sums = FIRST_SUMS;
  return call;
}

inline void own_rows(const PackedPanel<Q4_1>& panel, const QuantizedRows& x, int64_t first_row, float* totals) {
  EightByFour call = call_for<EightByFour>(x, first_row);
  for (int part = 0; part < PER; ++part) {
    call.quants = panel.quants + part * 4 * LANES;
    call.scales = panel.scales + part * 2 * LANES;
    // As `ask_ahead`: all in one walk, and in the others a line that is there.
    call.ahead = panel.quants + (part == 0 ? PanelShape<Q4_1>{x.units}.bytes() : 0);
    call.ahead_stride = part == 0 ? 320 : 0;
    call.totals = totals + part * LANES;
    call.run();
  }
}

template <class F>
void own_rows(const ExpandedPanel<F>& panel, const QuantizedRows& x, int64_t first_row, float* totals) {
  FourByEight call = call_for<FourByEight>(x, first_row);
  for (int part = 0; part < PER; part += 2) {
    call.quants = panel.quants + part * 4 * LANES;
    call.scales = panel.scales + part * LANES;
    call.minima = panel.minima + part * LANES;
    call.totals = totals + part * LANES;
    call.run();
  }
}
#else
template <class F, class Panel>
constexpr int OWN_ROWS = 0;
template <class Panel>
void own_rows(const Panel&, const QuantizedRows&, int64_t, float*) {}
#endif

template <class F, class Panel>
void all_rows(int64_t rows, const Panel& panel, const QuantizedRows& x, int64_t first_row, float* totals) {
  constexpr int MOST = MAX_ROWS<F, Panel>, OWN = OWN_ROWS<F, Panel>;
  for (int64_t row = 0; row < rows;) {
    // One row for itself costs as much as three among others.
    const int64_t count = MOST == 4 && rows - row == 5 ? 3 : std::min<int64_t>(rows - row, MOST);
    if constexpr (OWN > 0) {
      if (count == OWN) own_rows(panel, x, first_row + row, totals + row * OUTPUTS);
      else up_to_rows<F, Panel, OWN - 1>(count, panel, x, first_row + row, totals + row * OUTPUTS);
    } else {
      up_to_rows<F, Panel, MOST>(count, panel, x, first_row + row, totals + row * OUTPUTS);
    }
    row += count;
  }
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
          const Factors<false> own(x.factors + ((first_row + row + r) * x.units + unit) * 2);
          total[r] = merge<F>(total[r], whole, scale, minimum, own);
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
  if (rows <= PACKED_ROWS<F>) return all_rows<F>(rows, packed, x, first_row, totals);
  thread_local Scratch scratch;
  using Kind = typename F::Kind;
  using Panel = ExpandedPanel<Kind>;
  const Panel panel = expand(packed, x.units, scratch.get<uint8_t>(Panel::bytes(x.units)));
#if defined(QUIRE_HAS_AMX_INT8)
  if (use_amx && rows > 4) return rows_by_tiles(panel, x, first_row, rows, totals);
#else
  (void)use_amx;
#endif
  all_rows<Kind>(rows, panel, x, first_row, totals);
}

#define QUIRE_PANEL_TOTALS(F) \
  template void panel_totals<F>(const uint8_t*, const QuantizedRows&, int64_t, int64_t, bool, float*);
#define QUIRE_SIMPLE_FORMATS(each) each(Q4_0) each(Q4_1) each(Q5_0) each(Q5_1) each(Int8) each(Mxfp4)
#define QUIRE_OTHER_FORMATS(each) each(Q8_0) each(Q4_K) each(Q5_K) each(Q6_K)

}  // namespace quire
