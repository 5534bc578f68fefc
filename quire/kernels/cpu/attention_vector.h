// One task's walk over tiles of keys with vector instructions, for float32 and for machines without tiles.
#pragma once

#include "attention.h"
#include "threads.h"

namespace quire {

// Lane i of the result is lane from[i] of a and b, counted through both.
inline Vec pick(Vec a, Vec b, IntVec from) {
#if defined(__clang__)
  Vec result;
  for (int i = 0; i < LANES; ++i) result[i] = from[i] < LANES ? a[from[i]] : b[from[i] - LANES];
  return result;
#else
  return __builtin_shuffle(a, b, from);
#endif
}

// LANES vectors become one that holds the sum of each: halves are folded onto each other, so every sum is
// taken by the same tree.
template <int COUNT>
inline void fold(Vec* v) {
  if constexpr (COUNT > 1) {
    constexpr int HALF = COUNT / 2;
    IntVec low, high;
    for (int i = 0; i < LANES; ++i) {
      int base = i / COUNT * COUNT + i % HALF;
      low[i] = i % COUNT < HALF ? base : base + LANES;
      high[i] = low[i] + HALF;
    }
    for (int i = 0; i < HALF; ++i) v[i] = pick(v[i], v[i + HALF], low) + pick(v[i], v[i + HALF], high);
    fold<HALF>(v);
  }
}

template <class T>
class VectorWalk {
 public:
  explicit VectorWalk(const Attention<T>& call) : call_(call), dim_(call.padded_dim()) {
    thread_local Scratch scratch;
    keys_ = scratch.get<float>(size_t((2 * KEY_TILE + TASK_ROWS) * dim_ + KEY_TILE));
    values_ = keys_ + KEY_TILE * dim_;
    query_ = values_ + KEY_TILE * dim_;
    weights_ = query_ + TASK_ROWS * dim_;
  }

  void start(const Rows<T>& rows) {
    for (int64_t r = 0; r < rows.task.rows; ++r) widen(rows.query(r), query_ + r * dim_);
  }

  void tile(const Rows<T>& rows, const KeyTile& tile, const KeyTile& next, State& state) {
    for (int64_t i = 0; i < KEY_TILE; ++i) {
      prefetch(call_, next, i);
      if (tile.has(i)) {
        widen(call_.keys + tile.place[i], keys_ + i * dim_);
        widen(call_.values + tile.place[i], values_ + i * dim_);
      } else {
        std::fill(keys_ + i * dim_, keys_ + (i + 1) * dim_, 0.0f);
      }
    }
    for (int64_t r = 0; r < rows.task.rows; ++r) {
      Visible visible = rows.visible(r);
      int64_t from = std::max(visible.begin, tile.begin), to = std::min(visible.end, tile.end);
      if (from >= to) continue;
      scores(query_ + r * dim_);
      float factor = scores_to_weights(weights_, weights_, tile.origin, visible, call_.scale, state.highest[r],
                                       state.total + r * SUM_LANES);
      add_values(state.output + r * dim_, factor, from - tile.origin, to - tile.origin);
    }
  }

  void finish() {}

 private:
  void widen(const T* source, float* target) const {
    int64_t i = 0;
    for (; i + LANES <= call_.head_dim; i += LANES) store(target + i, load(source + i));
    if (i < call_.head_dim) {
      store(target + i, read(source + i, call_.head_dim - i));
      i += LANES;
    }
    for (; i < dim_; i += LANES) store(target + i, Vec{});
  }

  void scores(const float* query) {
    for (int64_t key = 0; key < KEY_TILE; key += LANES) {
      Vec sums[LANES];
      for (int j = 0; j < LANES; ++j) {
        const float* row = keys_ + (key + j) * dim_;
        Vec sum[PER_SUM] = {};
        for (int64_t i = 0; i < dim_; i += SUM_LANES)
          for (int v = 0; v < PER_SUM; ++v)
            sum[v] = fma(load(query + i + v * LANES), load(row + i + v * LANES), sum[v]);
        sums[j] = fold_vectors(sum);
      }
      fold<LANES>(sums);
      store(weights_ + key, sums[0]);
    }
  }

  // Only keys the row sees are touched: a later token's values, even infinite ones, can't reach it.
  void add_values(float* output, float factor, int64_t from, int64_t to) const {
    constexpr int64_t WIDE = 32 / LANES;  // dim_ is a multiple of 32
    for (int64_t i = 0; i < dim_; i += 32) {
      Vec sums[WIDE];
      for (int64_t j = 0; j < WIDE; ++j) sums[j] = load(output + i + j * LANES) * factor;
      for (int64_t key = from; key < to; ++key) {
        Vec weight = splat(weights_[key]);
        for (int64_t j = 0; j < WIDE; ++j)
          sums[j] = fma(weight, load(values_ + key * dim_ + i + j * LANES), sums[j]);
      }
      for (int64_t j = 0; j < WIDE; ++j) store(output + i + j * LANES, sums[j]);
    }
  }

  const Attention<T>& call_;
  int64_t dim_;
  float *keys_, *values_, *query_, *weights_;
};

}  // namespace quire
