// One task's walk over tiles of keys with vector instructions, for float32 and for machines without tiles.
//
// A lane is a key: scores and outputs are then both products of small matrices, in which each number is one chain of
// fused products in a fixed order, however many rows are computed together. The cache has its keys by dimension for it;
// those of other caches are turned over first.
#pragma once

#include <type_traits>

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

// Turns LANES x LANES numbers over, by exchanging halves of ever larger squares.
template <int SIZE = 1>
inline void turn_over(Vec* v) {
  if constexpr (SIZE < LANES) {
    IntVec low, high;
    for (int i = 0; i < LANES; ++i) {
      low[i] = i & SIZE ? LANES + i - SIZE : i;
      high[i] = low[i] + SIZE;
    }
    for (int i = 0; i < LANES; ++i) {
      if (i & SIZE) continue;
      const Vec first = v[i], second = v[i + SIZE];
      v[i] = pick(first, second, low);
      v[i + SIZE] = pick(first, second, high);
    }
    turn_over<2 * SIZE>(v);
  }
}

// Columns whose sums are in registers together: all that ROWS rows leave room for.
constexpr int64_t columns_of(int rows) { return rows <= 2 || LANES == 16 ? 32 : 16; }

constexpr int KEY_RUN = 16;  // keys that lie side by side in a cache by dimension: a block has whole runs

// Rows of numbers up to row `end`, `stride` apart. The first KEY_RUN columns lie at `first`, the others at `second`.
// What is read after some hundred cycles lies `near` behind each row before `near_end`, what is read after all of these
// at `ahead`, at the same stride.
template <class N>
struct Lines {
  const N *first, *second, *ahead;
  int64_t stride, end, near, near_end;
};

// sums[r][i] = start + left[r][from] * right[from][i] + ... + left[r][to - 1] * right[to - 1][i], in this order, for
// ROWS rows and columns_of(ROWS) columns. What it starts from is what stands there if KEEP, or zero. right(k) tells the
// Lines that begin with row k: what is looked up is looked up once for several rows.
template <int ROWS, bool KEEP, class Right>
QUIRE_STAND_IN void multiply(const float* left, int64_t left_stride, Right right, int64_t from, int64_t to, float* sums,
                     int64_t sums_stride) {
  constexpr int VECTORS = int(columns_of(ROWS)) / LANES;
  Vec s[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) s[r][v] = KEEP ? load(sums + r * sums_stride + v * LANES) : Vec{};
  for (int64_t k = from; k < to;) {
    auto [first, second, ahead, stride, end, near, near_end] = right(k);
    end = std::min(end, to);
    QUIRE_UNROLL_BY(4)
    for (; k < end; ++k, first += stride, second += stride, ahead += stride) {
      Vec values[VECTORS];
      for (int v = 0; v < VECTORS; ++v)
        values[v] = load(v * LANES < KEY_RUN ? first + v * LANES : second + v * LANES - KEY_RUN);
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(k < near_end ? first + near : first, 0, 3);
      QUIRE_FMA_LOOP for (int r = 0; r < ROWS; ++r) {
        const Vec factor = splat(left[r * left_stride + k]);
        QUIRE_FMA_LOOP for (int v = 0; v < VECTORS; ++v) s[r][v] = fma(factor, values[v], s[r][v]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) store(sums + r * sums_stride + v * LANES, s[r][v]);
}

template <class T, class CACHED = T>
class VectorWalk {
 public:
  explicit VectorWalk(const Attention<T, CACHED>& call) : call_(call), dim_(call.padded_dim()), value_dim_(call.padded_value_dim()) {
    thread_local Scratch scratch;
    keys_ = scratch.get<float>(
        size_t((KEY_TILE + TASK_ROWS) * dim_ + KEY_TILE * value_dim_ + TASK_ROWS * KEY_TILE));
    values_ = keys_ + KEY_TILE * dim_;
    query_ = values_ + KEY_TILE * value_dim_;
    weights_ = query_ + TASK_ROWS * dim_;
  }

  // How many key heads of a sequence can be walked together, whose queries are `rows` each: then keys and values are
  // read as they lie in memory, a block's heads one after the other.
  static int64_t heads_together(const Attention<T, CACHED>& call, int64_t rows) {
    const bool in_place = call.keys_by_dimension && call.padded_dim() == call.head_dim && !SCALED && rows <= TOGETHER;
    return in_place ? std::min(call.num_kv_heads, TASK_ROWS / TOGETHER) : 1;
  }

  // The rows of `heads` key heads from the task's on.
  void start(Rows<T, CACHED> rows, int64_t heads) {
    heads_ = heads;
    for (int64_t i = 0; i < heads * rows.task.rows; ++i) {
      if (i && i % rows.task.rows == 0) ++rows.task.kv_head;
      widen(rows.query(i % rows.task.rows), call_.head_dim, query_ + i * dim_, dim_);
      slopes_[i] = rows.slope(i % rows.task.rows);
    }
    for (int64_t r = 0; r < rows.task.rows; ++r) visible_[r] = rows.visible(r);
    // Values that are read once, or need not be widened, are not worth a copy; those that end in the middle of a vector
    // need it.
    const bool is_wide = std::is_same_v<CACHED, float>;
    copies_ = COPIED || value_dim_ != call_.value_dim || (rows.task.rows > TOGETHER && !is_wide);
  }

  // One state for each head.
  void tile(const Rows<T, CACHED>& rows, const KeyTile& tile, const KeyTile& next, State* state) {
    if (!call_.keys_by_dimension) turn_keys(tile, next);
    for (int64_t i = tile.begin - tile.origin; i < tile.end - tile.origin; ++i) {
      if (SCALED) {
        const int64_t place = rows.scale_place(tile.origin + i);
        key_scales_[i] = call_.key_scales[place], value_scales_[i] = call_.value_scales[place];
      }
      if (copies_) widen(call_.value(tile.place[i]), call_.value_dim, values_ + i * value_dim_, value_dim_);
    }
    int64_t first = 0;
    if constexpr (MOST_TOGETHER > TOGETHER && !COPIED)
      for (; first + MOST_TOGETHER <= rows.task.rows; first += MOST_TOGETHER)
        attend<int(MOST_TOGETHER)>(rows, tile, next, first, state);
    for (; first < rows.task.rows; first += TOGETHER) {
      const int64_t left = rows.task.rows - first;
      if constexpr (!COPIED) {
        if (left == 2) attend<2>(rows, tile, next, first, state);
        if (left == 3) attend<3>(rows, tile, next, first, state);
      } else if (left == 2 || left == 3) {  // rarely used: less to compile
        for (int64_t row = first; row < rows.task.rows; ++row) attend<1>(rows, tile, next, row, state);
      }
      if (left == 1) attend<1>(rows, tile, next, first, state);
      if (left >= TOGETHER) attend<4>(rows, tile, next, first, state);
    }
  }

  void finish() {}

 private:
  static constexpr int64_t TOGETHER = 4;  // rows
  // Rows of which there are many, where there are registers for their sums: each number is read for more of them.
  static constexpr int64_t MOST_TOGETHER = LANES == 16 ? 8 : TOGETHER;

  static constexpr bool SCALED = std::is_same_v<CACHED, int8_t>;
  // FP8 numbers become floats once, before they are multiplied; they never lie by dimension.
  static constexpr bool COPIED = std::is_same_v<CACHED, fp8>;

  // `size` numbers as floats, with zeros up to `padded`.
  template <class FROM>
  static void widen(const FROM* source, int64_t size, float* target, int64_t padded) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(target + i, load(source + i));
    if (i < size) {
      store(target + i, read(source + i, size - i));
      i += LANES;
    }
    for (; i < padded; i += LANES) store(target + i, Vec{});
  }

  // A key's scale may as well be multiplied with its score, a value's with its weight.
  static void scale(float* numbers, const float* scales) {
    for (int64_t i = 0; i < KEY_TILE; i += LANES) store(numbers + i, load(numbers + i) * load(scales + i));
  }

  // keys_[dim][key], for the keys of the tile and perhaps some zeros before and after them.
  void turn_keys(const KeyTile& tile, const KeyTile& next) {
    static const CACHED zeros[MAX_HEAD_DIM] = {};
    for (int64_t key = (tile.begin - tile.origin) / LANES * LANES; key < tile.end - tile.origin; key += LANES) {
      const CACHED* source[LANES];
      for (int j = 0; j < LANES; ++j) source[j] = tile.has(key + j) ? call_.key(tile.place[key + j]) : zeros;
      for (int j = 0; j < LANES; ++j) prefetch(call_, next, key + j);
      for (int64_t i = 0; i < call_.head_dim; i += LANES) {
        Vec square[LANES];
        for (int j = 0; j < LANES; ++j) square[j] = read(source[j] + i, call_.head_dim - i);
        turn_over(square);
        for (int j = 0; j < LANES; ++j) store(keys_ + (i + j) * KEY_TILE + key, square[j]);
      }
    }
  }

  // Where KEY_RUN keys of the tile lie side by side, of which one or more are seen. Where none is, others do as well:
  // nobody looks at their scores.
  const CACHED* key_run(const KeyTile& tile, int64_t key) const {
    const int64_t seen = std::min(std::max(key, tile.begin - tile.origin), tile.end - 1 - tile.origin);
    const CACHED* run = call_.first_dimension(tile.place[seen], (tile.origin + seen) % call_.block_size);
    return run - seen % KEY_RUN;
  }

  // ROWS rows from `first` on, of each head. Later rows see later keys: what the first and the last see, all do.
  template <int ROWS>
  void attend(const Rows<T, CACHED>& rows, const KeyTile& tile, const KeyTile& next, int64_t first, State* state) {
    Visible seen[ROWS];  // within the tile
    for (int r = 0; r < ROWS; ++r) {
      const Visible visible = visible_[first + r];
      seen[r] = {std::max(visible.begin, tile.begin) - tile.origin, std::min(visible.end, tile.end) - tile.origin};
    }
    score<ROWS>(tile, next, first, seen);
    for (int64_t head = 0; head < heads_; ++head)
      for (int r = 0; r < ROWS; ++r) {
        const int64_t row = first + r;
        const Bias bias{slopes_[head * rows.task.rows + row], tile.origin - visible_[row].end + 1};
        weigh(seen[r], weights_ + (head * ROWS + r) * KEY_TILE, bias, row, state[head]);
      }
    if (copies_)
      return add_values<ROWS>(seen, weights_, state->output + first * value_dim_, [&](int64_t key) {
        const float* values = values_ + key * value_dim_;
        return Lines<float>{values, values + KEY_RUN, values, value_dim_, KEY_TILE, 0, 0};
      });
    if constexpr (!COPIED) {
      if (first > 0)  // they have just been read
        return add_values<ROWS>(seen, weights_, state->output + first * value_dim_, [&](int64_t key) {
          const CACHED* values = call_.value(tile.place[key]);
          const int64_t end = block_end(tile, key);
          return Lines<CACHED>{values, values + KEY_RUN, values, call_.head_dim, end, 0, 0};
        });
      // As the memory lies, a few keys with all their columns at a time.
      for (int64_t from = 0; from < KEY_TILE; from += KEY_RUN) {
        Visible now[ROWS];
        for (int r = 0; r < ROWS; ++r)
          now[r] = {std::max(seen[r].begin, from), std::min(seen[r].end, from + KEY_RUN)};
        for (int64_t head = 0; head < heads_; ++head)
          add_values<ROWS>(now, weights_ + head * ROWS * KEY_TILE, state[head].output + first * value_dim_, [&](int64_t key) {
            const int64_t end = block_end(tile, key);
            const CACHED *values = call_.value(tile.place[key]) + head * head_size(), *ahead = values;
            if (tile.has(key + KEY_RUN) && key + KEY_RUN < KEY_TILE) ahead = call_.value(tile.place[key + KEY_RUN]);
            else if (next.has(key % KEY_RUN)) ahead = call_.value(next.place[key % KEY_RUN]);
            if (ahead != values) ahead += head * head_size();
            return Lines<CACHED>{values, values + KEY_RUN, ahead, call_.head_dim, end, columns_of(ROWS), KEY_TILE};
          });
      }
    }
  }

  // Where the block of the tile's key ends.
  int64_t block_end(const KeyTile& tile, int64_t key) const {
    return key + call_.block_size - (tile.origin + key) % call_.block_size;
  }

  // Numbers of a head in a block: so far apart are neighbouring heads.
  int64_t head_size() const { return call_.block_size * call_.head_dim; }

  // weights_[head][row][key] = the products of queries and keys.
  template <int ROWS>
  void score(const KeyTile& tile, const KeyTile& next, int64_t first, const Visible* seen) {
    constexpr int64_t WIDE = columns_of(ROWS);
    for (int64_t key = seen[0].begin / WIDE * WIDE; key < seen[ROWS - 1].end; key += WIDE) {
      auto multiply_keys = [&](auto keys, int64_t head) {
        multiply<ROWS, false>(query_ + (first + head * ROWS) * dim_, dim_, [&](int64_t) { return keys; }, 0,
                              call_.head_dim, weights_ + head * ROWS * KEY_TILE + key, KEY_TILE);
      };
      if (!call_.keys_by_dimension) {
        const float* keys = keys_ + key;
        multiply_keys(Lines<float>{keys, keys + KEY_RUN, keys, KEY_TILE, call_.head_dim, 0, 0}, 0);
        continue;
      }
      if constexpr (!COPIED) {
        const CACHED *keys = key_run(tile, key), *more = WIDE > KEY_RUN ? key_run(tile, key + KEY_RUN) : keys;
        const bool is_last = key + WIDE >= tile.end - tile.origin;
        const CACHED* ahead = !is_last ? key_run(tile, key + WIDE) : next.begin < next.end ? key_run(next, 0) : keys;
        const int64_t stride = call_.block_size;
        for (int64_t head = 0; head < heads_; ++head) {
          const int64_t at = head * head_size(), size = call_.head_dim, near = KEY_RUN * stride;
          const int64_t near_end = head + 1 < heads_ ? size : size - KEY_RUN;
          multiply_keys(Lines<CACHED>{keys + at, more + at, ahead + at, stride, size, near, near_end}, head);
        }
      }
    }
  }

  // A row's scores become weights, and what it has summed up so far is brought to its new maximum.
  void weigh(Visible seen, float* weights, Bias bias, int64_t row, State& state) {
    if (seen.begin >= seen.end) return;
    if (SCALED) scale(weights, key_scales_);
    const float factor = scores_to_weights(weights, weights, 0, seen, call_.scale, call_.cap, bias, state.highest[row],
                                           state.total + row * SUM_LANES);
    if (SCALED) scale(weights, value_scales_);
    float* output = state.output + row * value_dim_;
    if (factor != 1.0f)
      for (int64_t i = 0; i < value_dim_; i += LANES) store(output + i, load(output + i) * factor);
  }

  // Only keys a row sees are touched: a later token's values, even infinite ones, can't reach it. So rows go together
  // over the keys that all of them see, and alone over those before and after.
  template <int ROWS, class Values>
  void add_values(const Visible* seen, const float* weights, float* output, Values values) {
    Visible common{seen[ROWS - 1].begin, seen[0].end};
    if (common.begin >= common.end) common = {KEY_TILE, KEY_TILE};
    auto alone = [&](int64_t r, Visible keys) { add<1>(weights + r * KEY_TILE, keys, output + r * value_dim_, values); };
    for (int r = 0; r < ROWS; ++r) alone(r, {seen[r].begin, std::min(common.begin, seen[r].end)});
    add<ROWS>(weights, common, output, values);
    for (int r = 0; r < ROWS; ++r) alone(r, {std::max(common.end, seen[r].begin), seen[r].end});
  }

  template <int ROWS, class Values>
  void add(const float* weights, Visible keys, float* output, Values values) {
    if (keys.begin >= keys.end) return;
    for (int64_t i = 0; i < value_dim_; i += columns_of(ROWS))
      multiply<ROWS, true>(
          weights, KEY_TILE,
          [&](int64_t key) {
            auto lines = values(key);
            lines.first += i, lines.second += i, lines.ahead += i;
            return lines;
          },
          keys.begin, keys.end, output + i, value_dim_);
  }

  const Attention<T, CACHED>& call_;
  int64_t dim_, value_dim_, heads_ = 1;
  bool copies_ = false;
  float slopes_[TASK_ROWS];  // of each row of each head
  Visible visible_[TASK_ROWS];  // of each row: to divide by the number of heads takes as long as many products
  float *keys_, *values_, *query_, *weights_;
  float key_scales_[KEY_TILE] = {}, value_scales_[KEY_TILE] = {};
};

}  // namespace quire
