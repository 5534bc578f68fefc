// Paged attention: what is asked, how it is cut into tasks, and the softmax that all of them share.
//
// A query of one head is a row. A row walks its keys in tiles of KEY_TILE and splits of SPLIT keys, both
// counted from the first token of its sequence: within a split with a running maximum, then the splits are
// merged in order. So its sums are the same wherever its blocks lie, whoever shares its tile, and whether one
// thread walked all splits or each had its own.
#pragma once

#include <algorithm>

#include "arguments.h"
#include "simd.h"

namespace quire {

constexpr int64_t KEY_TILE = 64;
constexpr int64_t SPLIT = 256;
constexpr int64_t MAX_HEAD_DIM = 1024;
constexpr int64_t ROW_BLOCK = 16;                // rows whose scores are computed together
constexpr int64_t TASK_ROWS = 4 * ROW_BLOCK;     // rows that share one pass over a tile of keys and values
constexpr float NOTHING = -std::numeric_limits<float>::max();  // the maximum of a row that saw no key yet

// Queries and outputs are T, keys and values in the cache CACHED: T too, fp8, or int8_t with a scale for each token and
// head.
template <class T, class CACHED = T>
struct Attention {
  const T* query;
  int64_t query_stride;
  const CACHED *keys, *values;
  const float *key_scales, *value_scales;
  const int32_t *query_start, *context_lens, *block_tables, *table_rows;
  T* out;
  int64_t num_sequences, max_blocks, num_heads, num_kv_heads, head_dim;
  int64_t value_dim;  // of values: less than head_dim where they are the first numbers of the keys, in the same memory
  int64_t block_size;
  int64_t block_stride, scale_stride;  // from block to block: numbers of keys and of values, and scales of either
  int64_t window, chunk;  // 0: none
  int64_t keys_by_dimension;  // 1: a block's keys are [head_dim][block_size], 0: [block_size][head_dim]
  const float* sinks;  // a score of each head that no key stands for; null for none
  const float* slopes;  // of each head, times the distance of a key and added to its score; null for none
  float scale;  // with log2(e) in it: weights are powers of two
  float cap;    // scores become cap * tanh(score / cap), with log2(e) in it too; 0: they stay
  float value_scale;  // of all values
  int num_threads;
  QUIRE_ARGUMENTS(query, query_stride, keys, values, key_scales, value_scales, query_start, context_lens,
                  block_tables, table_rows, out, num_sequences, max_blocks, num_heads, num_kv_heads, head_dim,
                  value_dim, block_size, block_stride, scale_stride, window, chunk, keys_by_dimension, sinks, slopes, scale,
                  cap, value_scale, num_threads)

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t padded_dim() const { return (head_dim + 31) / 32 * 32; }
  int64_t padded_value_dim() const { return (value_dim + 31) / 32 * 32; }
  const CACHED* key(int64_t place) const { return keys + place; }
  const CACHED* value(int64_t place) const { return values + place; }
  // Of keys that lie by dimension: the first number of the token at this place, the offset-th of its block; the others
  // follow at block_size numbers.
  const CACHED* first_dimension(int64_t place, int64_t offset) const { return keys + place - offset * (head_dim - 1); }
};

// Rows [first, first + rows) of one sequence and key head, where row r is query r / group, head r % group.
struct Task {
  int64_t sequence, kv_head, first, rows;
};

// The state of a task's rows: sums of weights times values, sums of weights (in SUM_LANES parts), maxima. Weights are
// powers of two of scores that were multiplied with log2(e).
struct State {
  float *output, *total, *highest;  // [rows][padded_value_dim], [rows][SUM_LANES], [rows]

  static int64_t floats(int64_t padded_dim) { return TASK_ROWS * (padded_dim + SUM_LANES + 1); }
  static State at(float* memory, int64_t padded_dim) {
    float* total = memory + TASK_ROWS * padded_dim;
    return {memory, total, total + TASK_ROWS * SUM_LANES};
  }
  void clear(int64_t rows, int64_t padded_dim) {
    std::fill(output, output + rows * padded_dim, 0.0f);
    std::fill(total, total + rows * SUM_LANES, 0.0f);
    std::fill(highest, highest + rows, NOTHING);
  }
  // Adds a later split's state of the same rows; a split in which a row saw nothing leaves it untouched.
  void merge(const State& later, int64_t rows, int64_t padded_dim) {
    for (int64_t r = 0; r < rows; ++r) {
      if (later.highest[r] == NOTHING) continue;
      float top = std::max(highest[r], later.highest[r]);
      Vec mine = exp2_of_negative(splat(highest[r] - top));
      Vec other = exp2_of_negative(splat(later.highest[r] - top));
      highest[r] = top;
      auto add = [&](float* sum, const float* more) { store(sum, fma(load(more), other, load(sum) * mine)); };
      for (int64_t i = r * SUM_LANES; i < (r + 1) * SUM_LANES; i += LANES) add(total + i, later.total + i);
      for (int64_t i = r * padded_dim; i < (r + 1) * padded_dim; i += LANES) add(output + i, later.output + i);
    }
  }
};

// Which keys [begin, end) a task's row sees.
struct Visible {
  int64_t begin, end;
};

// KEY_TILE tokens from `origin` on, of which a task's rows see [begin, end). No other is looked up or read:
// it may be another request's, or nobody's.
struct KeyTile {
  int64_t origin, begin, end;
  int64_t place[KEY_TILE];  // of a token's numbers of one head among all values, and keys if they lie by token

  bool has(int64_t i) const { return origin + i >= begin && origin + i < end; }
};

template <class T, class CACHED = T>
struct Rows {
  const Attention<T, CACHED>& call;
  Task task;

  int64_t query_row(int64_t r) const { return call.query_start[task.sequence] + (task.first + r) / call.group(); }
  int64_t head(int64_t r) const { return task.kv_head * call.group() + (task.first + r) % call.group(); }
  Visible visible(int64_t r) const {
    int64_t new_tokens = call.query_start[task.sequence + 1] - call.query_start[task.sequence];
    int64_t end = call.context_lens[task.sequence] - new_tokens + (task.first + r) / call.group() + 1;
    if (call.chunk > 0) return {(end - 1) / call.chunk * call.chunk, end};
    return {call.window > 0 ? std::max<int64_t>(0, end - call.window) : 0, end};
  }
  // What row r's scores rise by from key to key.
  float slope(int64_t r) const { return call.slopes ? call.slopes[head(r)] * 1.44269504f : 0.0f; }
  const T* query(int64_t r) const { return call.query + query_row(r) * call.query_stride + head(r) * call.head_dim; }
  T* out(int64_t r) const { return call.out + (query_row(r) * call.num_heads + head(r)) * call.value_dim; }
  // Where the scales of a token are.
  int64_t scale_place(int64_t token) const {
    const int32_t* table = call.block_tables + call.table_rows[task.sequence] * call.max_blocks;
    const int64_t in_block = task.kv_head * call.block_size + token % call.block_size;
    return table[token / call.block_size] * call.scale_stride + in_block;
  }
  // Fills in where tokens [tile.begin, tile.end) lie.
  void find(KeyTile& tile) const {
    const int32_t* table = call.block_tables + call.table_rows[task.sequence] * call.max_blocks;
    for (int64_t t = tile.begin; t < tile.end;) {
      int64_t block = t / call.block_size, next_block = std::min((block + 1) * call.block_size, tile.end);
      const int64_t in_block = (task.kv_head * call.block_size + t % call.block_size) * call.head_dim;
      int64_t place = table[block] * call.block_stride + in_block;
      for (; t < next_block; ++t, place += call.head_dim) tile.place[t - tile.origin] = place;
    }
  }
};

template <class WEIGHT>
inline Vec store_rounded(WEIGHT* weights, Vec v) {
  store(weights, v);
  return load(weights);
}

// Asks for the i-th key and value of the tile that comes next, while this one is worked on: blocks lie anywhere, so
// the machine can't guess it.
template <class T, class CACHED>
inline void prefetch(const Attention<T, CACHED>& call, const KeyTile& next, int64_t i) {
  if (!next.has(i)) return;
  for (int64_t d = 0; d < call.head_dim; d += int64_t(64 / sizeof(CACHED))) {
    __builtin_prefetch(call.key(next.place[i]) + d, 0, 2);
    __builtin_prefetch(call.value(next.place[i]) + d, 0, 2);
  }
}

// A score's addend: slope times how far the key is behind the query. The tile's first key is `first` tokens from it.
struct Bias {
  float slope;
  int64_t first;
};

// Turns one row's scores of a tile into weights relative to the row's new maximum, zero for keys it may not see
// whatever their score. The sum is that of the weights as stored. Returns what the row's earlier output must be
// multiplied with.
template <class WEIGHT>
QUIRE_STAND_IN float scores_to_weights(const float* scores, WEIGHT* weights, int64_t tile_begin, Visible visible, float scale,
                               float cap, Bias bias, float& highest, float* total) {
  constexpr int VECTORS = int(KEY_TILE) / LANES;
  const bool all = visible.begin <= tile_begin && visible.end >= tile_begin + KEY_TILE;
  Vec s[VECTORS], tops[PER_SUM];
  for (int v = 0; v < VECTORS; ++v) s[v] = load(scores + v * LANES) * scale;
  if (cap > 0.0f)
    for (int v = 0; v < VECTORS; ++v) s[v] = soft_capped(s[v], cap);
  if (bias.slope != 0.0f) {
    Vec distance;
    for (int i = 0; i < LANES; ++i) distance[i] = float(bias.first + i);
    for (int v = 0; v < VECTORS; ++v, distance += float(LANES)) s[v] = fma(splat(bias.slope), distance, s[v]);
  }
  if (!all) {
    IntVec key;
    for (int i = 0; i < LANES; ++i) key[i] = i;
    const int32_t begin = int32_t(visible.begin - tile_begin), end = int32_t(visible.end - tile_begin);
    for (int v = 0; v < VECTORS; ++v, key += LANES)
      s[v] = ((key >= begin) & (key < end)) ? s[v] : splat(-std::numeric_limits<float>::infinity());
  }
  for (int i = 0; i < PER_SUM; ++i) tops[i] = s[i];
  for (int v = PER_SUM; v < VECTORS; v += PER_SUM)
    for (int i = 0; i < PER_SUM; ++i) tops[i] = maximum(tops[i], s[v + i]);
  for (int i = 1; i < PER_SUM; ++i) tops[0] = maximum(tops[0], tops[i]);
  const float new_highest = max_lanes(maximum(tops[0], splat(highest)));
  Vec sums[PER_SUM] = {};
  constexpr int AT_ONCE = 4;
  for (int v = 0; v < VECTORS; v += AT_ONCE) {
    Vec powers[AT_ONCE];
    QUIRE_UNROLL_BY(4)
    for (int i = 0; i < AT_ONCE; ++i) powers[i] = s[v + i] - new_highest;
    exp2_of_negative(powers);
    QUIRE_UNROLL_BY(4)
    for (int i = 0; i < AT_ONCE; ++i) sums[i % PER_SUM] += store_rounded(weights + (v + i) * LANES, powers[i]);
  }
  const Vec factor = exp2_of_negative(splat(highest - new_highest));
  highest = new_highest;
  for (int v = 0; v < PER_SUM; ++v) store(total + v * LANES, fma(load(total + v * LANES), factor, sums[v]));
  return factor[0];
}

}  // namespace quire
