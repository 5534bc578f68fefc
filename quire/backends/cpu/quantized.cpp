// Products with quantised weights: activations become 8-bit integers, 32 of a row at a time, and integers are
// multiplied. The layout, the formats and the order of additions are described in quantized.h.
#include "quantized.h"

#include <algorithm>

#include "arguments.h"
#include "quantized_product.h"
#include "threads.h"

namespace quire {

#define QUIRE_DECLARE(F) extern QUIRE_PANEL_TOTALS(F)
QUIRE_SIMPLE_FORMATS(QUIRE_DECLARE)
QUIRE_OTHER_FORMATS(QUIRE_DECLARE)

namespace {

constexpr int64_t ROW_CHUNK = 128;  // rows of one task: a panel is taken apart once for them

// x as integers, with a scale for each unit of each row; a unit that is not all numbers has a scale of NaN.
template <class T>
void quantize_row(const T* x, int64_t units, int8_t* quants, float* factors, int32_t* sums) {
  constexpr int VECTORS = int(UNIT) / LANES;
  for (int64_t unit = 0; unit < units; ++unit) {
    Vec v[VECTORS];
    IntVec top = {};
    for (int i = 0; i < VECTORS; ++i) {
      v[i] = load(x + unit * UNIT + i * LANES);
      IntVec magnitude = (IntVec)v[i] & 0x7fffffff;  // compares like the number; infinity and NaN are above all
      top = magnitude > top ? magnitude : top;
    }
    const int32_t top_bits = max_lanes(top);
    float highest;
    std::memcpy(&highest, &top_bits, 4);
    const bool finite = top_bits < 0x7f800000;
    const float scale = finite ? highest / 127.0f : std::numeric_limits<float>::quiet_NaN();
    // Below this the reciprocal would be infinite; so small a unit counts as zero.
    const float inverse = finite && highest > 1e-36f ? 127.0f / highest : 0.0f;
    IntVec halves[2] = {};
    for (int i = 0; i < VECTORS; ++i) {
      Vec whole = round_to_whole((finite ? v[i] : Vec{}) * inverse);
      IntVec number = __builtin_convertvector(whole, IntVec);
      halves[2 * i / VECTORS] += number;
      store_bytes(quants + unit * UNIT + i * LANES, number);
    }
    for (int half = 0; half < 2; ++half) {
      sums[2 * unit + half] = sum_lanes(halves[half]);
    }
    factors[2 * unit] = scale;
    factors[2 * unit + 1] = float(sums[2 * unit] + sums[2 * unit + 1]) * scale;
  }
}

struct QuantizedPart {
  const uint8_t* packed;
  int64_t columns, format;
  QUIRE_ARGUMENTS(packed, columns, format)
};

template <class T>
struct QuantizedLinear {
  const T* x;
  int64_t x_stride;
  const QuantizedPart* parts;
  int64_t num_parts;
  const T* bias;  // null for none
  T* out;
  int64_t out_stride, rows, depth;
  int num_threads, use_amx;
  QUIRE_ARGUMENTS(x, x_stride, parts, num_parts, bias, out, out_stride, rows, depth, num_threads, use_amx)

  void run() const {
    if (rows == 0) return;
    const int64_t units = depth / UNIT;
    QuantizedRows quantized = quantize(units);
    int64_t panels = 0;
    for (int64_t i = 0; i < num_parts; ++i) panels += num_panels(parts[i]);
    const int64_t chunks = (rows + ROW_CHUNK - 1) / ROW_CHUNK;
    // Neighbours are read one after the other, so a task takes several; enough tasks stay to even out the threads.
    const int64_t group = std::max<int64_t>(1, panels / (8 * num_threads));
    const int64_t groups = (panels + group - 1) / group;
    parallel_tasks(num_threads, groups * chunks, [&](int64_t task) {
      const int64_t first_row = task % chunks * ROW_CHUNK, end_row = std::min(first_row + ROW_CHUNK, rows);
      const int64_t begin = task / chunks * group, end = std::min(begin + group, panels);
      int64_t panel = 0, column = 0;
      for (int64_t i = 0; i < num_parts; ++i) {
        const int64_t count = num_panels(parts[i]);
        with_format(parts[i].format, [&](auto format) {
          using F = decltype(format);
          for (int64_t p = std::max(begin, panel); p < std::min(end, panel + count); ++p)
            one_panel<F>(parts[i], p - panel, column, quantized, first_row, end_row);
        });
        panel += count;
        column += parts[i].columns;
      }
    });
  }

  static int64_t num_panels(const QuantizedPart& part) { return (part.columns + OUTPUTS - 1) / OUTPUTS; }

  QuantizedRows quantize(int64_t units) const {
    static thread_local Scratch scratch;
    float* factors = scratch.get<float>(size_t(rows * units) * (4 + UNIT / 4));
    int32_t* sums = reinterpret_cast<int32_t*>(factors + 2 * rows * units);
    int8_t* quants = reinterpret_cast<int8_t*>(sums + 2 * rows * units);
    parallel_shares(num_threads, rows, depth, [&](int64_t row) {
      quantize_row(x + row * x_stride, units, quants + row * depth, factors + 2 * row * units, sums + 2 * row * units);
    });
    return {quants, factors, sums, units};
  }

  template <class F>
  void one_panel(const QuantizedPart& part, int64_t index, int64_t column, const QuantizedRows& quantized,
                 int64_t first_row, int64_t end_row) const {
    const PanelShape<F> shape{quantized.units};
    const uint8_t* data = part.packed + index * shape.bytes();
    alignas(64) float totals[ROW_CHUNK * OUTPUTS];
    const int64_t count = end_row - first_row;
    panel_totals<F>(data, quantized, first_row, count, use_amx != 0, totals);
    const int64_t first = column + index * OUTPUTS, width = std::min(OUTPUTS, part.columns - index * OUTPUTS);
    for (int64_t row = 0; row < count; ++row)
      for (int p = 0; p < PER && p * LANES < width; ++p) {
        Vec v = load(totals + row * OUTPUTS + p * LANES);
        if constexpr (F::PER_OUTPUT) v = v * F::output_scale(data + shape.quant_bytes(), p);
        if (bias) v = v + read(bias + first + p * LANES, width - p * LANES);
        write(out + (first_row + row) * out_stride + first + p * LANES, v, width - p * LANES);
      }
  }
};

// Rows as they are stored become panels; what is left of the last one is zeros. `channel_scales` is Int8's.
struct PackQuantized {
  const uint8_t* stored;
  const float* channel_scales;
  uint8_t* packed;
  int64_t columns, depth, format;
  int num_threads;
  QUIRE_ARGUMENTS(stored, channel_scales, packed, columns, depth, format, num_threads)

  void run() const {
    with_format(format, [&](auto f) { pack<decltype(f)>(); });
  }

  template <class F>
  void pack() const {
    const PanelShape<F> shape{depth / UNIT};
    const int64_t panels = (columns + OUTPUTS - 1) / OUTPUTS, row_bytes = depth / F::STORED * F::STORED_BYTES;
    prefer_large_pages(packed, panels * shape.bytes());
    parallel_tasks(num_threads, panels, [&](int64_t panel) {
      uint8_t* quants = packed + panel * shape.bytes();
      uint8_t* scales = quants + shape.quant_bytes();
      std::memset(quants, 0, size_t(shape.bytes()));
      for (int64_t output = 0; output < std::min(OUTPUTS, columns - panel * OUTPUTS); ++output) {
        const uint8_t* row = stored + (panel * OUTPUTS + output) * row_bytes;
        if (F::PER_OUTPUT) std::memcpy(scales + 4 * output, channel_scales + panel * OUTPUTS + output, 4);
        for (int64_t block = 0; block < depth / F::STORED; ++block, row += F::STORED_BYTES) {
          uint8_t values[F::STORED];
          F::unpack(row, values);
          F::put_scales(scales, block * (F::STORED / UNIT), output, row);
          for (int64_t k = 0; k < F::STORED; ++k)
            F::put(quants + (block * F::STORED + k) / UNIT * F::UNIT_BYTES, output, k % UNIT, values[k]);
        }
      }
    });
  }
};

// Rows of a packed weight as float32, for an embedding table.
struct UnpackQuantized {
  const uint8_t* packed;
  const int64_t* ids;
  float* out;
  int64_t rows, depth, format;
  int num_threads;
  QUIRE_ARGUMENTS(packed, ids, out, rows, depth, format, num_threads)

  void run() const {
    with_format(format, [&](auto f) {
      using F = decltype(f);
      parallel_shares(num_threads, rows, depth * 4, [&](int64_t row) { unpack<F>(ids[row], out + row * depth); });
    });
  }

  template <class F>
  void unpack(int64_t id, float* target) const {
    const PanelShape<F> shape{depth / UNIT};
    const int64_t output = id % OUTPUTS;
    const int part = int(output) / LANES, lane = int(output) % LANES;
    const uint8_t* quants = packed + id / OUTPUTS * shape.bytes();
    const uint8_t* scales = quants + shape.quant_bytes();
    for (int64_t unit = 0; unit < shape.units; ++unit, quants += F::UNIT_BYTES) {
      float minimum = 0.0f;
      if constexpr (F::MINIMA) minimum = F::minimum(scales, unit, part)[lane];
      for (int block = 0; block < F::BLOCKS; ++block) {
        float scale = F::scale(scales, unit, block, part)[lane];
        if constexpr (F::PER_OUTPUT) scale = F::output_scale(scales, part)[lane];
        for (int64_t k = block * UNIT / F::BLOCKS; k < (block + 1) * UNIT / F::BLOCKS; ++k)
          target[unit * UNIT + k] = float(int(F::get(quants, output, k)) - F::ZERO) * scale + minimum;
      }
    }
  }
};

struct PackedSize {
  int64_t columns, depth, format;
  int64_t* bytes;
  QUIRE_ARGUMENTS(columns, depth, format, bytes)

  void run() const {
    with_format(format, [&](auto f) {
      const PanelShape<decltype(f)> shape{depth / UNIT};
      *bytes = (columns + OUTPUTS - 1) / OUTPUTS * shape.bytes();
    });
  }
};

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" {
QUIRE_NAMES(formats, QUIRE_FORMATS)
QUIRE_DESCRIBE(quantized_part, QuantizedPart)
QUIRE_FUNCTION(packed_size, call->run(), PackedSize)
QUIRE_FUNCTION(pack_quantized, call->run(), PackQuantized)
QUIRE_FUNCTION(unpack_quantized, call->run(), UnpackQuantized)
QUIRE_FUNCTION(linear_quantized_float32, call->run(), QuantizedLinear<float>)
QUIRE_FUNCTION(linear_quantized_bfloat16, call->run(), QuantizedLinear<bf16>)
}
