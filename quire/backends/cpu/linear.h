// The layout `pack_linear` gives a weight, shared by the products that read it.
//
// The N output columns go in panels of PANEL (the last one may be narrower). A panel holds, for each step
// along K, its columns side by side: one number per column in float32, a pair of numbers (k, k + 1) in
// bfloat16, which is how tile instructions want them. No padding: a packed weight is as large as the loaded one.
#pragma once

#include "arguments.h"
#include "simd.h"

namespace quire {

constexpr int64_t PANEL = 32;

template <class T>
constexpr int64_t STEP = sizeof(T) == 2 ? 2 : 1;  // numbers along K that lie side by side

template <class T>
struct Linear {
  const T* x;
  int64_t x_stride;
  const T* weight;
  const T* bias;  // null for none
  T* out;
  int64_t out_stride, rows, columns, depth;
  int num_threads;
  QUIRE_ARGUMENTS(x, x_stride, weight, bias, out, out_stride, rows, columns, depth, num_threads)

  int64_t num_panels() const { return (columns + PANEL - 1) / PANEL; }
  int64_t width(int64_t panel) const {
    int64_t left = columns - panel * PANEL;
    return left < PANEL ? left : PANEL;
  }
  const T* panel_data(int64_t panel) const { return weight + panel * PANEL * depth; }

  // One row's sums of a panel, in float32, become outputs: the bias is added before the only rounding.
  void finish_row(const float* sums, int64_t row, int64_t panel) const {
    int64_t first = panel * PANEL, count = width(panel);
    T* target = out + row * out_stride + first;
    for (int64_t i = 0; i < count; i += LANES) {
      Vec v = load(sums + i);
      if (bias) v = v + read(bias + first + i, count - i);
      write(target + i, v, count - i);
    }
  }
};

bool has_amx();
void linear_amx(const Linear<bf16>& call);

}  // namespace quire
