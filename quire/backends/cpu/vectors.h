// Rows of any length, vector by vector.
#pragma once

#include "simd.h"

namespace quire {

// Calls body(offset, count) for each vector of a row, the last one perhaps partial.
template <class Body>
inline void for_vectors(int64_t size, Body body) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) body(i, LANES);
  if (i < size) body(i, int(size - i));
}

// Four running sums of SUM_LANES side by side, so that one addition needn't wait for the last.
// `add` gets a vector, of which `count` numbers count, and the sum it belongs to.
template <class T, class Add>
float sum_over(const T* x, int64_t size, Add add) {
  constexpr int64_t VECTORS = 4 * PER_SUM;
  Vec sums[VECTORS] = {};
  const int64_t even = size - size % (VECTORS * LANES);
  for (int64_t i = 0; i < even; i += VECTORS * LANES)
    for (int64_t v = 0; v < VECTORS; ++v) add(load(x + i + v * LANES), LANES, sums[v]);
  for_vectors(size - even, [&](int64_t i, int count) {
    add(read(x + even + i, count), count, sums[i / LANES % PER_SUM]);
  });
  for (int64_t v = 0; v < PER_SUM; ++v)
    sums[v] = (sums[v] + sums[v + PER_SUM]) + (sums[v + 2 * PER_SUM] + sums[v + 3 * PER_SUM]);
  return sum_lanes(fold_vectors(sums));
}

}  // namespace quire
