// One task's walk over tiles of keys with tile instructions, in bfloat16.
//
// Scores come out transposed (keys times queries), because keys can then be read as they lie in the cache.
// Weights are rounded to bfloat16, summed as rounded, and multiplied with values laid out in pairs of keys.
#pragma once

#include <utility>

#include "amx.h"
#include "attention.h"
#include "threads.h"

#if defined(QUIRE_HAS_AMX)

namespace quire {

// Turns 16 x 16 numbers over: to[j][i] = from[i][j].
inline void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(from + i * from_stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      b[i + j] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0x88);
      b[i + j + 4] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    _mm512_storeu_ps(to + j * to_stride, _mm512_shuffle_f32x4(b[j], b[j + 8], 0x88));
    _mm512_storeu_ps(to + (j + 8) * to_stride, _mm512_shuffle_f32x4(b[j], b[j + 8], 0xdd));
  }
}

class AmxWalk {
 public:
  explicit AmxWalk(const Attention<bf16>& call)
      : call_(call),
        dim_(call.padded_dim()),
        value_dim_(call.padded_value_dim()),
        in_place_(call.block_size % 16 == 0 && call.head_dim == call.padded_dim()) {
    thread_local Scratch scratch;
    char* memory = scratch.get<char>(size_t((KEY_TILE + TASK_ROWS) * dim_ * 2 + KEY_TILE * value_dim_ * 2 + TASK_ROWS * KEY_TILE * (4 + 2)));
    auto take = [&](int64_t bytes) { return std::exchange(memory, memory + bytes); };
    keys_ = reinterpret_cast<bf16*>(take(KEY_TILE * dim_ * 2));
    values_ = reinterpret_cast<bf16*>(take(KEY_TILE * value_dim_ * 2));
    query_ = reinterpret_cast<uint32_t*>(take(TASK_ROWS * dim_ * 2));
    transposed_ = reinterpret_cast<float*>(take(TASK_ROWS * KEY_TILE * 4));
    weights_ = reinterpret_cast<bf16*>(take(TASK_ROWS * KEY_TILE * 2));
    std::fill(keys_, keys_ + KEY_TILE * dim_, bf16{0});  // what lies past head_dim stays zero
  }

  // Key heads that are walked together.
  static int64_t heads_together(const Attention<bf16>&, int64_t) { return 1; }

  // Queries as [dim / 2][16 rows] pairs, one such table for each block of rows.
  void start(const Rows<bf16>& rows, int64_t) {
    std::fill(query_, query_ + TASK_ROWS * dim_ / 2, 0u);
    for (int64_t r = 0; r < rows.task.rows; ++r) {
      const bf16* source = rows.query(r);
      uint32_t* target = query_ + r / ROW_BLOCK * ROW_BLOCK * dim_ / 2 + r % ROW_BLOCK;
      for (int64_t i = 0; i < call_.head_dim / 2; ++i) std::memcpy(target + i * ROW_BLOCK, source + 2 * i, 4);
    }
  }

  void tile(const Rows<bf16>& rows, const KeyTile& tile, const KeyTile& next, State* states) {
    State& state = *states;
    find_keys(tile);
    interleave_values(tile, next);
    // In three passes, so that what one stores has long arrived when the next loads it in another shape.
    const int64_t count = tile.end - tile.origin;
    auto each_block = [&](auto body) {
      for (int64_t first = 0; first < rows.task.rows; first += ROW_BLOCK) {
        body(first, std::min(ROW_BLOCK, rows.task.rows - first));
      }
    };
    each_block([&](int64_t first, int64_t num_rows) {
      configure(num_rows);
      scores(first, count);
    });
    each_block([&](int64_t first, int64_t num_rows) { weights(rows, tile.origin, first, num_rows, count, state); });
    each_block([&](int64_t first, int64_t num_rows) {
      configure(num_rows);
      add_values(first, state.output + first * value_dim_, count);
    });
  }

  void finish() { tile_release(); }

 private:
  // Tiles 0 and 1: transposed scores, 2: keys, 3: queries, 4 and 5: outputs, 6: weights, 7: values.
  void configure(int64_t num_rows) {
    if (num_rows == configured_) return;
    configured_ = num_rows;
    TileConfig config;
    for (int tile : {0, 1, 3}) config.set(tile, 16, int(num_rows * 4));
    for (int tile : {4, 5, 6}) config.set(tile, int(num_rows), 64);
    for (int tile : {2, 7}) config.set(tile, 16, 64);
    config.use();
  }

  // Points at each 16 keys of the tile: in the cache where 16 lie in one block, otherwise in a copy. Scores of
  // keys that no row sees may come out as anything; they are replaced before they are used.
  void find_keys(const KeyTile& tile) {
    for (int64_t i = 0; tile.origin + i < tile.end; i += 16) {
      if (in_place_ && tile.has(i)) {
        keys_at_[i / 16] = call_.key(tile.place[i]);
        continue;
      }
      keys_at_[i / 16] = keys_ + i * dim_;
      for (int64_t j = i; j < i + 16; ++j)
        if (tile.has(j))
          std::memcpy(static_cast<void*>(keys_ + j * dim_), call_.key(tile.place[j]), size_t(call_.head_dim) * 2);
    }
  }

  // values_[pair of keys][dim][2], zeros for keys that no row sees: they meet weights of zero.
  void interleave_values(const KeyTile& tile, const KeyTile& next) {
    const __m512i low = interleaved(0), high = interleaved(16);
    const __mmask32 last = __mmask32(~uint32_t(0) >> (value_dim_ - call_.value_dim));
    for (int64_t i = 0; tile.origin + i < tile.end || i % 32 != 0; i += 2) {
      prefetch(call_, next, i);
      prefetch(call_, next, i + 1);
      const bool has_even = tile.has(i), has_odd = tile.has(i + 1);
      const bf16* even = call_.value(has_even ? tile.place[i] : 0);
      const bf16* odd = call_.value(has_odd ? tile.place[i + 1] : 0);
      const __mmask32 even_mask = has_even ? ~__mmask32(0) : 0, odd_mask = has_odd ? ~__mmask32(0) : 0;
      auto interleave = [&](int64_t d, __mmask32 mask) {
        bf16* target = values_ + i * value_dim_ + 2 * d;
        __m512i a = _mm512_maskz_loadu_epi16(mask & even_mask, even + d);
        __m512i b = _mm512_maskz_loadu_epi16(mask & odd_mask, odd + d);
        _mm512_storeu_si512(target, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(target + 32, _mm512_permutex2var_epi16(a, high, b));
      };
      for (int64_t d = 0; d + 32 < value_dim_; d += 32) interleave(d, ~__mmask32(0));
      interleave(value_dim_ - 32, last);
    }
  }

  static __m512i interleaved(int from) {
    alignas(64) int16_t index[32];
    for (int i = 0; i < 32; ++i) index[i] = int16_t(from + i / 2 + (i % 2 ? 32 : 0));
    return _mm512_load_si512(index);
  }

  // transposed_[block of rows][key][row], from products of 16 keys at a time.
  void scores(int64_t first_row, int64_t count) {
    const uint32_t* query = query_ + first_row * dim_ / 2;
    float* target = transposed_ + first_row * KEY_TILE;
    for (int64_t key = 0; key < count; key += 32) {
      const bf16* first = keys_at_[key / 16];
      const bf16* second = key + 16 < count ? keys_at_[key / 16 + 1] : first;
      tile_zero<0>();
      tile_zero<1>();
      for (int64_t i = 0; i < dim_; i += 32) {
        tile_load<3>(query + i / 2 * ROW_BLOCK, ROW_BLOCK * 4);
        tile_load<2>(first + i, dim_ * 2);
        tile_product<0, 2, 3>();
        tile_load<2>(second + i, dim_ * 2);
        tile_product<1, 2, 3>();
      }
      tile_store<0>(target + key * ROW_BLOCK, ROW_BLOCK * 4);
      tile_store<1>(target + (key + 16) * ROW_BLOCK, ROW_BLOCK * 4);
    }
  }

  // Moves a block's scores of 16 keys to their rows; few rows are cheaper to pick out one by one.
  void turn(const float* from, float* to, int64_t num_rows) {
    if (num_rows > 4) return transpose(from, ROW_BLOCK, to, KEY_TILE);
    const __m512i index = _mm512_mullo_epi32(_mm512_set1_epi32(int(ROW_BLOCK)),
                                             _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    for (int64_t r = 0; r < num_rows; ++r)
      _mm512_storeu_ps(to + r * KEY_TILE, _mm512_i32gather_ps(index, from + r, 4));
  }

  // Scores become rounded weights, and the rows' earlier outputs are scaled to their new maxima.
  void weights(const Rows<bf16>& rows, int64_t begin, int64_t first, int64_t num_rows, int64_t count, State& state) {
    alignas(64) float scores[ROW_BLOCK * KEY_TILE];
    for (int64_t key = 0; key < count; key += 16)
      turn(transposed_ + (first * KEY_TILE + key * ROW_BLOCK), scores + key, num_rows);
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t row = first + r;
      bf16* target = weights_ + row * KEY_TILE;
      Visible visible = rows.visible(row);
      if (visible.begin >= begin + KEY_TILE || visible.end <= begin) {
        std::memset(static_cast<void*>(target), 0, KEY_TILE * 2);
        continue;
      }
      float factor = scores_to_weights(scores + r * KEY_TILE, target, begin, visible, call_.scale, call_.cap,
                                       {rows.slope(row), begin - visible.end + 1}, state.highest[row],
                                       state.total + row * SUM_LANES);
      float* output = state.output + row * value_dim_;
      if (factor != 1.0f)
        for (int64_t i = 0; i < value_dim_; i += LANES) store(output + i, load(output + i) * factor);
    }
  }

  void add_values(int64_t first, float* output, int64_t count) {
    const bf16* weights = weights_ + first * KEY_TILE;
    for (int64_t i = 0; i < value_dim_; i += 32) {
      tile_load<4>(output + i, value_dim_ * 4);
      tile_load<5>(output + i + 16, value_dim_ * 4);
      for (int64_t key = 0; key < count; key += 32) {
        const bf16* values = values_ + key * value_dim_ + 2 * i;
        tile_load<6>(weights + key, KEY_TILE * 2);
        tile_load<7>(values, value_dim_ * 4);
        tile_product<4, 6, 7>();
        tile_load<7>(values + 32, value_dim_ * 4);
        tile_product<5, 6, 7>();
      }
      tile_store<4>(output + i, value_dim_ * 4);
      tile_store<5>(output + i + 16, value_dim_ * 4);
    }
  }

  const Attention<bf16>& call_;
  int64_t dim_, value_dim_, configured_ = 0;
  bool in_place_;
  bf16 *keys_, *values_, *weights_;
  uint32_t* query_;
  float* transposed_;
  const bf16* keys_at_[KEY_TILE / 16];
};

}  // namespace quire

#endif
