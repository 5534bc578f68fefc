// Matrix products with vector instructions, packing, and rows of a packed table.
//
// An output is the sum over K in one fixed order: KC products one after the other, then the next KC, and the
// partial sums added in order. How many rows are computed side by side changes none of these additions.
#include "linear.h"

#include <algorithm>
#include <type_traits>

#include "threads.h"

namespace quire {
namespace {

constexpr int64_t KC = 256;
constexpr int VECTORS = int(PANEL) / LANES;                   // vectors in a panel's row
#if defined(__aarch64__)
constexpr int MAX_ROWS = 2;  // rows whose sums fit the registers
#else
constexpr int MAX_ROWS = LANES == 16 ? 12 : LANES == 8 ? 3 : 1;
#endif
constexpr int64_t ROW_CHUNK = 16 * MAX_ROWS;

inline void multiply_add(const float* weights, const float* const* x, int64_t k, int rows, Vec (*sums)[VECTORS]) {
  Vec w[VECTORS];
  for (int v = 0; v < VECTORS; ++v) w[v] = load(weights + v * LANES);
  for (int r = 0; r < rows; ++r) {
    Vec factor = splat(x[r][k]);
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = fma(factor, w[v], sums[r][v]);
  }
}

inline void multiply_add(const bf16* weights, const bf16* const* x, int64_t k, int rows, Vec (*sums)[VECTORS]) {
  UIntVec pairs[VECTORS];
  std::memcpy(pairs, weights, sizeof pairs);
  for (int r = 0; r < rows; ++r) {
    Vec first = splat(to_float(x[r][k])), second = splat(to_float(x[r][k + 1]));
    for (int v = 0; v < VECTORS; ++v) {
      sums[r][v] = fma(first, low_bf16(pairs[v]), sums[r][v]);
      sums[r][v] = fma(second, high_bf16(pairs[v]), sums[r][v]);
    }
  }
}

#if defined(__aarch64__)
// The same for four steps along K. A number of x for all lanes is a lane of four that are loaded together: a copy of it
// would take the place of a product.
template <int ROWS>
inline void four_steps(const float* weights, const float* const* x, int64_t k, Vec (*sums)[VECTORS]) {
  float32x4_t factors[ROWS];
  for (int r = 0; r < ROWS; ++r) factors[r] = vld1q_f32(x[r] + k);
  auto step = [&](auto lane) __attribute__((always_inline)) {
    for (int v = 0; v < VECTORS; ++v) {
      const Vec w = load(weights + lane() * PANEL + v * LANES);
      for (int r = 0; r < ROWS; ++r)
        sums[r][v] = (Vec)vfmaq_laneq_f32((float32x4_t)sums[r][v], (float32x4_t)w, factors[r], lane());
    }
  };
  step(std::integral_constant<int, 0>{});
  step(std::integral_constant<int, 1>{});
  step(std::integral_constant<int, 2>{});
  step(std::integral_constant<int, 3>{});
}
#endif

// What comes next in memory, asked for while rows are multiplied with what is there: `lines` with every step along K,
// into the second level of the cache. So it takes the time of the reading or of the multiplying, not that of both.
struct Ahead {
  const char* next;
  int lines;

  void ask() {
#if defined(__aarch64__)  // elsewhere it was not measured
    for (int i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
#endif
  }
};

// Adds the products of k in [begin, end) for ROWS rows to their totals (PANEL floats per row).
template <class T, int ROWS>
void block_of_rows(const T* panel, const T* x, int64_t x_stride, int64_t begin, int64_t end, Ahead ahead,
                   float* totals) {
  const T* row[ROWS];
  for (int r = 0; r < ROWS; ++r) row[r] = x + r * x_stride;
  Vec sums[ROWS][VECTORS] = {};
  int64_t k = begin;
#if defined(__aarch64__)
  if constexpr (sizeof(T) == 4)
    for (; k + 4 <= end; k += 4) {
      for (int i = 0; i < 4; ++i) ahead.ask();
      four_steps<ROWS>(panel + k * PANEL, row, k, sums);
    }
#endif
  for (; k < end; k += STEP<T>) {
    ahead.ask();
    multiply_add(panel + k * PANEL, row, k, ROWS, sums);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) {
      float* total = totals + r * PANEL + v * LANES;
      store(total, load(total) + sums[r][v]);
    }
}

template <class T, int ROWS = MAX_ROWS>
void up_to_max_rows(int64_t rows, const T* panel, const T* x, int64_t x_stride, int64_t begin, int64_t end,
                    Ahead ahead, float* totals) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return up_to_max_rows<T, ROWS - 1>(rows, panel, x, x_stride, begin, end, ahead, totals);
  }
  block_of_rows<T, ROWS>(panel, x, x_stride, begin, end, ahead, totals);
}

// The last panel may be narrower: a copy filled up with zeros lets the same code run on it.
template <class T>
const T* full_panel(const Linear<T>& call, int64_t panel) {
  const T* data = call.panel_data(panel);
  int64_t width = call.width(panel) * STEP<T>;
  if (width == PANEL * STEP<T>) return data;
  thread_local Scratch scratch;
  T* padded = scratch.get<T>(size_t(call.depth * PANEL));
  std::memset(static_cast<void*>(padded), 0, size_t(call.depth * PANEL) * sizeof(T));
  for (int64_t k = 0; k < call.depth / STEP<T>; ++k)
    std::memcpy(static_cast<void*>(padded + k * PANEL * STEP<T>), data + k * width, size_t(width) * sizeof(T));
  return padded;
}

template <class T>
void linear_vector(const Linear<T>& call) {
  int64_t chunks = (call.rows + ROW_CHUNK - 1) / ROW_CHUNK;
  parallel_tasks(call.num_threads, call.num_panels() * chunks, [&](int64_t task) {
    int64_t panel = task / chunks, first = task % chunks * ROW_CHUNK;
    int64_t end = first + ROW_CHUNK < call.rows ? first + ROW_CHUNK : call.rows;
    const T* weights = full_panel(call, panel);
    alignas(64) float totals[ROW_CHUNK * PANEL];
    std::memset(totals, 0, size_t(end - first) * PANEL * sizeof(float));
    for (int64_t k = 0; k < call.depth; k += KC) {
      const int64_t k_end = std::min(k + KC, call.depth);
      // Behind the last block comes the next panel's first.
      const int64_t later = std::min(KC, k_end < call.depth ? call.depth - k_end : call.depth);
      const int64_t lines = later * PANEL * int64_t(sizeof(T)) / 64, steps = (k_end - k) / STEP<T>;
      // What is read once, the machine itself asks for in time.
      Ahead ahead{reinterpret_cast<const char*>(weights + k_end * PANEL),
                  end - first > MAX_ROWS ? int((lines / 2 + steps - 1) / steps) : 0};
      for (int64_t row = first; row < end; row += MAX_ROWS) {
        up_to_max_rows<T>(end - row, weights, call.x + row * call.x_stride, call.x_stride, k, k_end, ahead,
                          totals + (row - first) * PANEL);
        // The second half with the rows behind, and then no more.
        ahead = {ahead.next + lines / 2 * 64, row == first ? ahead.lines : 0};
      }
    }
    for (int64_t row = first; row < end; ++row) call.finish_row(totals + (row - first) * PANEL, row, panel);
  });
}

// Each head's product with its own matrix, one behind the other in `weight`: threads take whole heads.
template <class T>
struct LinearHeads {
  const T* x;
  int64_t x_stride, x_head_stride;
  const T* weight;
  T* out;  // [rows][heads][columns]
  int64_t rows, heads, columns, depth;
  int num_threads;
  int64_t use_amx;
  QUIRE_ARGUMENTS(x, x_stride, x_head_stride, weight, out, rows, heads, columns, depth, num_threads, use_amx)

  void run() const {
    parallel_tasks(num_threads, heads, [&](int64_t head) {
      Linear<T> own{x + head * x_head_stride, x_stride, weight + head * columns * depth, nullptr, out + head * columns,
                    heads * columns, rows, columns, depth, 1};
      if constexpr (std::is_same_v<T, bf16>)
        if (use_amx) return linear_amx(own);
      linear_vector(own);
    });
  }
};

// [columns, depth] as loaded becomes panels.
template <class T>
struct Pack {
  const T* weight;
  T* packed;
  int64_t columns, depth;
  int num_threads;
  QUIRE_ARGUMENTS(weight, packed, columns, depth, num_threads)

  void run() const {
    prefer_large_pages(packed, columns * depth * int64_t(sizeof(T)));
    Linear<T> shape{};
    shape.columns = columns;
    parallel_tasks(num_threads, shape.num_panels(), [&](int64_t panel) {
      int64_t width = shape.width(panel);
      T* target = packed + panel * PANEL * depth;
      for (int64_t k = 0; k < depth; k += STEP<T>)
        for (int64_t column = 0; column < width; ++column)
          for (int64_t i = 0; i < STEP<T>; ++i) *target++ = weight[(panel * PANEL + column) * depth + k + i];
    });
  }
};

// Rows of the weight as it was before packing.
template <class T>
struct UnpackRows {
  const T* packed;
  const int64_t* ids;
  T* out;
  int64_t rows, columns, depth;
  int num_threads;
  QUIRE_ARGUMENTS(packed, ids, out, rows, columns, depth, num_threads)

  void run() const {
    Linear<T> shape{};
    shape.weight = packed;
    shape.columns = columns;
    shape.depth = depth;
    parallel_shares(num_threads, rows, depth, [&](int64_t row) {
      int64_t panel = ids[row] / PANEL, width = shape.width(panel);
      const T* source = shape.panel_data(panel) + ids[row] % PANEL * STEP<T>;
      for (int64_t k = 0; k < depth; k += STEP<T>)
        std::memcpy(static_cast<void*>(out + row * depth + k), source + k * width, sizeof(T) * STEP<T>);
    });
  }
};

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" {
QUIRE_FUNCTION(pack_float32, call->run(), Pack<float>)
QUIRE_FUNCTION(pack_bfloat16, call->run(), Pack<bf16>)
QUIRE_FUNCTION(unpack_rows_float32, call->run(), UnpackRows<float>)
QUIRE_FUNCTION(unpack_rows_bfloat16, call->run(), UnpackRows<bf16>)
QUIRE_FUNCTION(linear_float32, linear_vector(*call), Linear<float>)
QUIRE_FUNCTION(linear_bfloat16, linear_vector(*call), Linear<bf16>)
QUIRE_FUNCTION(linear_heads_float32, call->run(), LinearHeads<float>)
QUIRE_FUNCTION(linear_heads_bfloat16, call->run(), LinearHeads<bf16>)
QUIRE_FUNCTION(linear_amx, linear_amx(*call), Linear<bf16>)
QUIRE_EXPORT int quire_has_amx() { return has_amx(); }
}
