// Matrix products with vector instructions, packing, and rows of a packed table.
//
// An output is the sum over K in one fixed order: KC products one after the other, then the next KC, and the
// partial sums added in order. How many rows are computed side by side changes none of these additions.
#include "linear.h"

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

// Adds the products of k in [begin, end) for ROWS rows to their totals (PANEL floats per row).
template <class T, int ROWS>
void block_of_rows(const T* panel, const T* x, int64_t x_stride, int64_t begin, int64_t end, float* totals) {
  const T* row[ROWS];
  for (int r = 0; r < ROWS; ++r) row[r] = x + r * x_stride;
  Vec sums[ROWS][VECTORS] = {};
  for (int64_t k = begin; k < end; k += STEP<T>) multiply_add(panel + k * PANEL, row, k, ROWS, sums);
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) {
      float* total = totals + r * PANEL + v * LANES;
      store(total, load(total) + sums[r][v]);
    }
}

template <class T, int ROWS = MAX_ROWS>
void up_to_max_rows(int64_t rows, const T* panel, const T* x, int64_t x_stride, int64_t begin, int64_t end,
                    float* totals) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return up_to_max_rows<T, ROWS - 1>(rows, panel, x, x_stride, begin, end, totals);
  }
  block_of_rows<T, ROWS>(panel, x, x_stride, begin, end, totals);
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
      int64_t k_end = k + KC < call.depth ? k + KC : call.depth;
      for (int64_t row = first; row < end; row += MAX_ROWS)
        up_to_max_rows<T>(end - row, weights, call.x + row * call.x_stride, call.x_stride, k, k_end,
                          totals + (row - first) * PANEL);
    }
    for (int64_t row = first; row < end; ++row) call.finish_row(totals + (row - first) * PANEL, row, panel);
  });
}

// [columns, depth] as loaded becomes panels.
template <class T>
struct Pack {
  const T* weight;
  T* packed;
  int64_t columns, depth;
  int num_threads;

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
void quire_pack_float32(const Pack<float>* call) { call->run(); }
void quire_pack_bfloat16(const Pack<bf16>* call) { call->run(); }
void quire_unpack_rows_float32(const UnpackRows<float>* call) { call->run(); }
void quire_unpack_rows_bfloat16(const UnpackRows<bf16>* call) { call->run(); }
void quire_linear_float32(const Linear<float>* call) { linear_vector(*call); }
void quire_linear_bfloat16(const Linear<bf16>* call) { linear_vector(*call); }
void quire_linear_amx(const Linear<bf16>* call) { linear_amx(*call); }
int quire_has_amx() { return has_amx(); }
}
