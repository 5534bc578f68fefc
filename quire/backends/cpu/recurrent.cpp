// Layers with a state: convolutions over time, recurrences, and the norm with a gate behind them. `kernels/recurrent.py`
// has the formulas.
//
// Time is divided into chunks at fixed positions. Whoever computes a token reads the state at its chunk's begin and the
// records of the tokens since then, and adds in the same order: every output is one chain of fused products, over the
// state's rows first to last, or over the chunk's tokens first to last, and a lane is a value column. Scores of two
// tokens are sums of SUM_LANES, as elsewhere. So neither the other rows of a step, nor how many of them are multiplied
// together, nor the threads, which have heads of their own, change a bit.
#include <algorithm>
#include <utility>
#include <vector>

#include "arguments.h"
#include "simd.h"
#include "threads.h"
#include "vectors.h"

namespace quire {
namespace {

constexpr int64_t CHUNK = 64;  // as in `kernels/recurrent.py`
constexpr float NORM_EPSILON = 1e-6f;  // of queries and keys in the delta rule

// Consecutive tokens of one sequence: rows [row, row + count) of the step, at positions [start, start + count).
struct Run {
  int64_t row, count, start, table;
};

// Lists of a step may divide a sequence's tokens, so that several threads attend for them. Here each needs the one
// before it: they are put together again.
template <class Call>
std::vector<Run> runs_of(const Call& call) {
  std::vector<Run> runs;
  for (int64_t i = 0; i < call.num_sequences; ++i) {
    const int64_t row = call.query_start[i], count = call.query_start[i + 1] - row;
    if (count <= 0) continue;
    const Run run{row, count, call.context_lens[i] - count, call.table_rows[i]};
    if (!runs.empty()) {
      Run& last = runs.back();
      if (last.table == run.table && last.start + last.count == run.start && last.row + last.count == row) {
        last.count += count;
        continue;
      }
    }
    runs.push_back(run);
  }
  return runs;
}

// Where a token's records lie.
struct Slot {
  int64_t block, offset;  // a negative block: nowhere, it is padding
};
template <class Call>
Slot slot_at(const Call& call, const Run& run, int64_t position) {
  const int64_t block = position / call.block_size;
  return {call.block_tables[run.table * call.max_blocks + block], position - block * call.block_size};
}
template <class Call>
Slot slot_of_row(const Call& call, int64_t row) {
  const int64_t slot = call.slots[row], block = slot < 0 ? -1 : slot / call.block_size;
  return {block, slot - block * call.block_size};
}
// Its record of one head, which has `size` numbers, in numbers from the first block's begin on.
template <class Call>
int64_t record(const Call& call, Slot slot, int64_t stride, int64_t head, int64_t size) {
  return slot.block * stride + (head * call.block_size + slot.offset) * size;
}

// One head of the state at a chunk's begin. `places` has for each head which of a state's blocks it is in, its address
// in block 0, and the bytes from block to block.
template <class N, class Call>
N* in_state(const Call& call, const int64_t* places, int64_t head, const Run& run, int64_t begin) {
  const int64_t* place = places + 3 * head;
  const int64_t state = begin / CHUNK % 2 * call.num_tables + run.table;
  const int64_t block = call.state_tables[state * call.state_blocks + place[0]];
  return reinterpret_cast<N*>(place[1] + block * place[2]);
}

Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

// log(1 + e^x) as max(x, 0) + log(1 + y), where y = e^-|x| is at most 1: then s = y / (2 + y) is at most 1/3, and
// log(1 + y) = 2 (s + s^3 / 3 + s^5 / 5 + ...).
Vec softplus(Vec x) {
  const Vec y = exp(x < 0.0f ? x : -x), s = y / (2.0f + y), square = s * s;
  Vec series = splat(1.0f / 15.0f);
  for (float term : {13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) series = fma(series, square, splat(1.0f / term));
  return (x > 0.0f ? x : Vec{}) + 2.0f * s * series;
}

// The sums of N products of rows, whose size is a multiple of SUM_LANES; side by side, so that no addition waits.
template <int N>
QUIRE_STAND_IN void dots(const float* left, const float* const* right, int64_t size, float* out) {
  Vec sums[N][PER_SUM] = {};
  for (int64_t i = 0; i < size; i += SUM_LANES)
    for (int v = 0; v < PER_SUM; ++v) {
      const Vec some = load(left + i + v * LANES);
      QUIRE_FMA_LOOP for (int n = 0; n < N; ++n) sums[n][v] = fma(some, load(right[n] + i + v * LANES), sums[n][v]);
    }
  for (int n = 0; n < N; ++n) out[n] = sum_lanes(fold_vectors(sums[n]));
}
void all_dots(const float* left, const float* const* right, int64_t count, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) dots<4>(left, right + i, size, out + i);
  for (; i < count; ++i) dots<1>(left, right + i, size, out + i);
}

// A matrix of factors: row r and column k are at r * row_step + k * step.
struct Factors {
  const float* numbers;
  int64_t row_step, step;
};

// sums[r][c] = left[r][0] * right(0)[c] + left[r][1] * right(1)[c] + ..., in this order, for `depth` of them.
template <int ROWS, int VECTORS, class Right>
QUIRE_STAND_IN void product(Factors left, int64_t depth, Right right, int64_t column, float* sums, int64_t stride) {
  Vec s[ROWS][VECTORS] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const float* line = right(k) + column;
    Vec values[VECTORS];
    for (int v = 0; v < VECTORS; ++v) values[v] = load(line + v * LANES);
    QUIRE_FMA_LOOP for (int r = 0; r < ROWS; ++r) {
      const Vec factor = splat(left.numbers[r * left.row_step + k * left.step]);
      QUIRE_FMA_LOOP for (int v = 0; v < VECTORS; ++v) s[r][v] = fma(factor, values[v], s[r][v]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) store(sums + r * stride + column + v * LANES, s[r][v]);
}
template <int ROWS, int VECTORS, class Right>
void all_columns(Factors left, int64_t depth, Right right, int64_t column, int64_t columns, float* sums) {
  for (; column + VECTORS * LANES <= columns; column += VECTORS * LANES)
    product<ROWS, VECTORS>(left, depth, right, column, sums, columns);
  if constexpr (VECTORS > 1)
    if (column < columns) all_columns<ROWS, VECTORS / 2>(left, depth, right, column, columns, sums);
}

// As many sums at a time as there are registers for. `columns` is a multiple of LANES.
template <class Right>
void multiply(Factors left, int64_t rows, int64_t depth, Right right, int64_t columns, float* sums) {
#if defined(__AVX512F__) || defined(__aarch64__)
  constexpr int FEW = 8, MANY = 4;
#else
  constexpr int FEW = 4, MANY = 2;
#endif
  auto next = [&](int64_t count) {
    left.numbers += count * left.row_step, sums += count * columns, rows -= count;
  };
  for (; rows >= 4; next(4)) all_columns<4, MANY>(left, depth, right, 0, columns, sums);
  for (; rows >= 2; next(2)) all_columns<2, FEW>(left, depth, right, 0, columns, sums);
  if (rows) all_columns<1, FEW>(left, depth, right, 0, columns, sums);
}

// Numbers as floats, with zeros behind them up to `padded`, a multiple of LANES.
template <class T>
void widen(const T* source, int64_t size, float* target, int64_t padded) {
  for_vectors(size, [&](int64_t i, int count) { store(target + i, read(source + i, count)); });
  for (int64_t i = (size + LANES - 1) / LANES * LANES; i < padded; i += LANES) store(target + i, Vec{});
}

int64_t padded_size(int64_t size) { return (size + SUM_LANES - 1) / SUM_LANES * SUM_LANES; }

// Inputs are kept in their slots, and the last ones of each chunk that ends in the step in the next one's state, if there
// are states (`tail_places`).
template <class T>
struct Convolve {
  const T* x;
  int64_t x_stride;
  const float *weight, *bias;
  T *out, *inputs;
  const int64_t* tail_places;
  const int32_t *query_start, *context_lens, *block_tables, *table_rows;
  const int64_t* slots;
  const int32_t* state_tables;
  int64_t rows, num_sequences, max_blocks, num_tables, state_blocks, channels, taps, block_size, block_stride, silu;
  int num_threads;
  QUIRE_ARGUMENTS(x, x_stride, weight, bias, out, inputs, tail_places, query_start, context_lens, block_tables,
                  table_rows, slots, state_tables, rows, num_sequences, max_blocks, num_tables, state_blocks, channels,
                  taps, block_size, block_stride, silu, num_threads)

  static constexpr int64_t TILE = 256;  // channels

  void run() const {
    switch (taps) {  // those that models have, so that loops over them have no ends to look for
      case 3: return run_with<3>();
      case 4: return run_with<4>();
      default: return run_with<0>();
    }
  }

  template <int TAPS>
  void run_with() const {
    const std::vector<Run> runs = runs_of(*this);
    parallel_shares(num_threads, (channels + TILE - 1) / TILE, rows * TILE * (taps + 16), [&](int64_t tile) {
      thread_local Scratch weights, kept;
      const int64_t begin = tile * TILE, size = std::min(TILE, channels - begin), count = TAPS ? TAPS : taps;
      float* factors = weights.get<float>(size_t((taps + 1) * TILE));  // by tap, and the bias
      for (int64_t i = 0; i < size; ++i)
        for (int64_t tap = 0; tap < count; ++tap) factors[tap * TILE + i] = weight[(begin + i) * count + tap];
      for (int64_t i = 0; bias && i < size; ++i) factors[taps * TILE + i] = bias[begin + i];
      T* before = kept.get<T>(size_t(taps * TILE));
      for (const Run& run : runs) one_run<TAPS>(run, begin, size, factors, before);
    });
  }

  template <int TAPS>
  void one_run(const Run& run, int64_t begin, int64_t size, const float* factors, T* before) const {
    const int64_t earlier = taps - 1, count = TAPS ? TAPS : taps;
    // Read before anything is written: a later chunk's state may have the place of the one this run begins with.
    for (int64_t i = 0; i < earlier; ++i) find(run, run.start - earlier + i, begin, size, before + i * TILE);
    auto input = [&](int64_t i) {  // `earlier` before the run's first
      return i < earlier ? before + i * TILE : x + (run.row + i - earlier) * x_stride + begin;
    };
    std::vector<const T*> several(size_t(TAPS ? 0 : taps));
    const T* few[TAPS + 1];
    const T** sources = TAPS ? few : several.data();
    for (int64_t i = 0; i < run.count; ++i) {
      for (int64_t tap = 0; tap < count; ++tap) sources[tap] = input(i + tap);
      T* target = out + (run.row + i) * channels + begin;
      for_vectors(size, [&](int64_t c, int lanes) {
        Vec total{};
        for (int64_t tap = 0; tap < count; ++tap)
          total = fma(read(sources[tap] + c, lanes), load(factors + tap * TILE + c), total);
        if (bias) total += load(factors + taps * TILE + c);
        write(target + c, silu ? total * sigmoid(total) : total, lanes);
      });
      if (const Slot slot = slot_of_row(*this, run.row + i); slot.block >= 0)
        copy(input(i + earlier), size, inputs + record(*this, slot, block_stride, 0, channels) + begin);
    }
    if (!tail_places) return;
    for (int64_t end = (run.start / CHUNK + 1) * CHUNK; end <= run.start + run.count; end += CHUNK)
      for (int64_t i = 0; i < earlier; ++i)
        copy(input(end - run.start + i), size, in_state<T>(*this, tail_places, i, run, end) + begin);
  }

  // The input at a position before the run, from the state if its chunk began later, else from the records.
  void find(const Run& run, int64_t position, int64_t begin, int64_t size, T* target) const {
    const int64_t chunk = tail_places ? run.start / CHUNK * CHUNK : 0;
    if (position < 0)
      std::fill(target, target + size, T{});
    else if (position < chunk)
      copy(in_state<T>(*this, tail_places, position - chunk + taps - 1, run, chunk) + begin, size, target);
    else
      copy(inputs + record(*this, slot_at(*this, run, position), block_stride, 0, channels) + begin, size, target);
  }

  static void copy(const T* from, int64_t size, T* to) { std::memcpy(to, from, size_t(size) * sizeof(T)); }
};

template <class T>
struct Recur {
  const T* mixed;
  int64_t mixed_stride;
  const T* gates;
  int64_t gates_stride;
  const T* decay_gates;  // of each channel of a key, or null: each value head has one decay
  int64_t decay_gates_stride;
  const float *log_rate, *time_bias, *skip;
  T* out;
  float *keys, *changes, *decays;
  const int64_t* state_places;
  const int32_t *query_start, *context_lens, *block_tables, *table_rows;
  const int64_t* slots;
  const int32_t* state_tables;
  int64_t rows, num_sequences, max_blocks, num_tables, state_blocks, num_key_heads, num_value_heads, key_dim, value_dim;
  int64_t block_size, key_stride, change_stride, decay_stride, is_delta;
  float least_step, largest_step, beta_scale;
  int num_threads;
  QUIRE_ARGUMENTS(mixed, mixed_stride, gates, gates_stride, decay_gates, decay_gates_stride, log_rate, time_bias, skip,
                  out, keys, changes, decays, state_places, query_start, context_lens, block_tables, table_rows, slots,
                  state_tables, rows, num_sequences, max_blocks, num_tables, state_blocks, num_key_heads,
                  num_value_heads, key_dim, value_dim, block_size, key_stride, change_stride, decay_stride, is_delta,
                  least_step, largest_step, beta_scale, num_threads)

  void run() const;
};

// Some value heads of one key head over one run of tokens, chunk by chunk.
template <class T>
class Walk {
 public:
  Walk(const Recur<T>& call, const Run& run, int64_t key_head)
      : call_(call), run_(run), key_head_(key_head), key_size_(padded_size(call.key_dim)),
        value_size_(padded_size(call.value_dim)) {
    thread_local Scratch scratch;
    const int64_t channels = call.decay_gates ? key_size_ : 0;
    float* memory = scratch.get<float>(size_t(CHUNK * (4 * key_size_ + 3 * value_size_ + 2 * CHUNK) +
                                              (call.key_dim + 8) * value_size_ + 2 * CHUNK + (3 * CHUNK + 1) * channels));
    auto take = [&](int64_t count) { return std::exchange(memory, memory + count); };
    new_rows_ = take(2 * CHUNK * key_size_);
    old_keys_ = take(CHUNK * key_size_);
    faded_keys_ = take(CHUNK * key_size_);
    said_ = take(2 * CHUNK * value_size_);
    own_changes_ = take(CHUNK * value_size_);
    overlaps_ = take(2 * CHUNK * CHUNK);
    state_copy_ = take(call.key_dim * value_size_);
    sums_ = take(8 * value_size_);
    factors_ = take(2 * CHUNK);
    faded_rows_ = take(2 * CHUNK * channels);
    own_decays_ = take(CHUNK * channels);
    apart_ = take(channels);
  }

  // Those of value heads [begin, end). Whoever has the key head's first one keeps its keys.
  void heads(int64_t begin, int64_t end) {
    const bool keeps_keys = begin % (call_.num_value_heads / call_.num_key_heads) == 0;
    const int64_t last = run_.start + run_.count;
    for (begin_ = run_.start / CHUNK * CHUNK; begin_ < last; begin_ += CHUNK) {
      const int64_t first = std::max(run_.start, begin_);
      known_ = first - begin_;
      count_ = std::min(last, begin_ + CHUNK) - begin_;
      row_ = run_.row + first - run_.start;
      for (int64_t i = 0; i < count_; ++i)
        slots_[i] = i < known_ ? slot_at(call_, run_, begin_ + i) : slot_of_row(call_, row_ + i - known_);
      find_keys(keeps_keys);
      if (!call_.decay_gates) find_overlaps();
      for (int64_t head = begin; head < end; ++head) one_head(head);
    }
  }

 private:
  float* new_key(int64_t i) const { return new_rows_ + 2 * (i - known_) * key_size_; }
  float* new_query(int64_t i) const { return new_key(i) + key_size_; }
  const T* mixed(int64_t i) const { return call_.mixed + (row_ + i - known_) * call_.mixed_stride; }

  // A known token's numbers, padded: in the cache, or in a copy.
  const float* padded(const float* numbers, int64_t size, int64_t padded_to, float* copy) const {
    if (size == padded_to) return numbers;
    widen(numbers, size, copy, padded_to);
    return copy;
  }

  void find_keys(bool keeps_keys) {
    const int64_t size = call_.key_dim;
    for (int64_t i = 0; i < known_; ++i) {
      const float* key = call_.keys + record(call_, slots_[i], call_.key_stride, key_head_, size);
      keys_[i] = padded(key, size, key_size_, old_keys_ + i * key_size_);
    }
    for (int64_t i = known_; i < count_; ++i) {
      const T* source = mixed(i) + key_head_ * size;
      widen(source, size, new_query(i), key_size_);
      widen(source + call_.num_key_heads * size, size, new_key(i), key_size_);
      if (call_.is_delta) {
        norm(new_query(i), 1.0f / std::sqrt(float(size)));
        norm(new_key(i), 1.0f);
      }
      keys_[i] = new_key(i);
      if (keeps_keys && slots_[i].block >= 0)
        copy(new_key(i), size, call_.keys + record(call_, slots_[i], call_.key_stride, key_head_, size));
    }
  }

  void norm(float* x, float factor) const {
    float squares;
    const float* self = x;
    dots<1>(x, &self, key_size_, &squares);
    const float inverse = factor / std::sqrt(squares + NORM_EPSILON);
    for (int64_t i = 0; i < key_size_; i += LANES) store(x + i, load(x + i) * inverse);
  }

  static void copy(const float* from, int64_t size, float* to) { std::memcpy(to, from, size_t(size) * sizeof(float)); }

  // Of new tokens with those up to them: overlaps_[i][0] of keys with earlier keys, [i][1] of queries with keys.
  void find_overlaps() {
    for (int64_t i = known_; i < count_; ++i) {
      if (call_.is_delta) all_dots(new_key(i), keys_, i, key_size_, overlaps_ + 2 * i * CHUNK);
      all_dots(new_query(i), keys_, i + 1, key_size_, overlaps_ + (2 * i + 1) * CHUNK);
    }
  }

  // decays_: sums of log-decays from the chunk's begin on. betas_: what changes are multiplied with.
  void find_decays(int64_t head) {
    float gate[CHUNK] = {}, steps[CHUNK];
    for (int64_t i = 0; i < CHUNK; ++i) decays_[i] = 0.0f;
    for (int64_t i = 0; i < known_; ++i)
      decays_[i] = call_.decays[record(call_, slots_[i], call_.decay_stride, head, 1)];
    auto read_gates = [&](int64_t column) {
      for (int64_t i = known_; i < count_; ++i)
        gate[i] = read(call_.gates + (row_ + i - known_) * call_.gates_stride + column, 1)[0];
    };
    read_gates(head);
    for (int64_t i = 0; i < CHUNK; i += LANES) {
      Vec step = softplus(load(gate + i) + call_.time_bias[head]);
      if (!call_.is_delta) {
        step = step < call_.least_step ? splat(call_.least_step) : step;
        step = step > call_.largest_step ? splat(call_.largest_step) : step;
      }
      store(steps + i, step);
      store(betas_ + i, step);
    }
    if (call_.is_delta) {
      read_gates(call_.num_value_heads + head);
      for (int64_t i = 0; i < CHUNK; i += LANES) store(betas_ + i, sigmoid(load(gate + i)) * splat(call_.beta_scale));
    }
    const float rate = -exp(splat(call_.log_rate[head]))[0];
    float total = known_ ? decays_[known_ - 1] : 0.0f;
    for (int64_t i = known_; i < count_; ++i) {
      total += rate * steps[i];
      decays_[i] = total;
      if (slots_[i].block >= 0) call_.decays[record(call_, slots_[i], call_.decay_stride, head, 1)] = total;
    }
    for (int64_t i = 0; i < CHUNK; i += LANES) store(from_begin_ + i, exp(load(decays_ + i)));
  }

  // The same where each channel has its own decay. `one_row` finds overlaps, keys and queries that have faded already.
  void find_channel_decays(int64_t head) {
    const int64_t size = call_.key_dim;
    const float rate = -exp(splat(call_.log_rate[head]))[0], *bias = call_.time_bias + head * size;
    float gate[CHUNK] = {};
    for (int64_t i = 0; i < CHUNK; ++i) decays_[i] = 0.0f, from_begin_[i] = 1.0f;
    for (int64_t i = 0; i < count_; ++i) {
      float *own = own_decays_ + i * key_size_, *kept = nullptr;
      if (slots_[i].block >= 0) kept = call_.decays + record(call_, slots_[i], call_.decay_stride, head, size);
      token_decays_[i] = own;
      if (i < known_) {
        token_decays_[i] = padded(kept, size, key_size_, own);
        continue;
      }
      gate[i] = read(call_.gates + (row_ + i - known_) * call_.gates_stride + head, 1)[0];
      const T* gates = call_.decay_gates + (row_ + i - known_) * call_.decay_gates_stride + head * size;
      for_vectors(size, [&](int64_t c, int count) {
        store(own + c, rate * softplus(read(gates + c, count) + read(bias + c, count)));
      });
      std::fill(own + size, own + key_size_, 0.0f);
      if (kept) copy(own, size, kept);
    }
    for (int64_t i = 0; i < CHUNK; i += LANES) store(betas_ + i, sigmoid(load(gate + i)) * splat(call_.beta_scale));
  }

  // What lies between a new token and those before it is summed from the later one backwards, channel by channel.
  void find_channel_overlaps() {
    for (int64_t i = known_; i < count_; ++i) {
      const float *key = new_key(i), *query = new_query(i);
      float *overlaps = overlaps_ + 2 * i * CHUNK, *faded = faded_rows_ + 2 * (i - known_) * key_size_;
      std::fill(apart_, apart_ + key_size_, 0.0f);
      for (int64_t j = i; j >= 0; --j) {
        Vec of_key[PER_SUM] = {}, of_query[PER_SUM] = {};
        for (int64_t c = 0; c < key_size_; c += SUM_LANES)
          for (int v = 0; v < PER_SUM; ++v) {
            const int64_t at = c + v * LANES;
            const Vec apart = load(apart_ + at), other = load(keys_[j] + at) * exp(apart);
            of_key[v] = fma(load(key + at), other, of_key[v]);
            of_query[v] = fma(load(query + at), other, of_query[v]);
            store(apart_ + at, apart + load(token_decays_[j] + at));
          }
        overlaps[j] = sum_lanes(fold_vectors(of_key));
        overlaps[CHUNK + j] = sum_lanes(fold_vectors(of_query));
      }
      for (int64_t c = 0; c < key_size_; c += LANES) {
        const Vec fading = exp(load(apart_ + c));
        store(faded + c, load(key + c) * fading);
        store(faded + key_size_ + c, load(query + c) * fading);
      }
    }
  }

  void one_head(int64_t head) {
    if (call_.decay_gates)
      find_channel_decays(head), find_channel_overlaps();
    else
      find_decays(head);
    const int64_t size = call_.value_dim;
    for (int64_t i = 0; i < count_; ++i) changes_[i] = own_changes_ + i * value_size_;
    for (int64_t i = 0; i < known_; ++i) {
      const float* change = call_.changes + record(call_, slots_[i], call_.change_stride, head, size);
      changes_[i] = padded(change, size, value_size_, own_changes_ + i * value_size_);
    }
    find_state(head);
    // What the state says of keys and of queries, [i][0] and [i][1]; without the delta rule of queries only.
    auto state_row = [&](int64_t k) { return state_ + k * value_size_; };
    const int64_t each = call_.is_delta ? 2 : 1;
    const float* new_rows = call_.decay_gates ? faded_rows_ : new_rows_;
    const Factors rows{new_rows + (2 - each) * key_size_, 2 / each * key_size_, 1};
    if (state_) multiply(rows, each * (count_ - known_), call_.key_dim, state_row, value_size_, said_);
    for (int64_t i = known_; i < count_; ++i)
      one_row(head, i, said_ + each * (i - known_) * value_size_, each);
    if (count_ == CHUNK) next_state(head);
  }

  void find_state(int64_t head) {
    state_ = nullptr;
    if (begin_ == 0) return;  // zeros
    state_ = in_state<float>(call_, call_.state_places, head, run_, begin_);
    if (value_size_ == call_.value_dim) return;
    for (int64_t k = 0; k < call_.key_dim; ++k)
      widen(state_ + k * call_.value_dim, call_.value_dim, state_copy_ + k * value_size_, value_size_);
    state_ = state_copy_;
  }

  void one_row(int64_t head, int64_t i, const float* said, int64_t each) {
    const float *overlaps = overlaps_ + 2 * i * CHUNK, now = decays_[i], from_begin = from_begin_[i], beta = betas_[i];
    for (int64_t j = 0; j <= i; j += LANES) {
      const Vec fading = exp(now - load(decays_ + j));
      if (each == 2) store(factors_ + j, load(overlaps + j) * fading);
      store(factors_ + CHUNK + j, load(overlaps + CHUNK + j) * fading);
    }
    const Factors factors{factors_ + (2 - each) * CHUNK, CHUNK, 1};
    multiply(factors, each, i, [&](int64_t j) { return changes_[j]; }, value_size_, sums_);
    const float *sums = sums_ + (each - 1) * value_size_, *asked = said + (each - 1) * value_size_;
    const float own = factors_[CHUNK + i], skip = call_.skip ? call_.skip[head] : 0.0f;
    float* change = own_changes_ + i * value_size_;
    const int64_t size = call_.value_dim;
    const T* value = mixed(i) + 2 * call_.num_key_heads * call_.key_dim + head * size;
    T* out = call_.out + ((row_ + i - known_) * call_.num_value_heads + head) * size;
    for_vectors(size, [&](int64_t c, int count) {
      const Vec v = read(value + c, count);
      Vec changed = v;
      if (each == 2) {
        if (state_) changed = fma(load(said + c), splat(-from_begin), changed);
        changed -= load(sums_ + c);
      }
      changed *= beta;
      store(change + c, changed);
      Vec output = fma(splat(own), changed, load(sums + c));
      if (state_) output = fma(load(asked + c), splat(from_begin), output);
      if (call_.skip) output = fma(splat(skip), v, output);
      write(out + c, output, count);
    });
    for (int64_t c = (size + LANES - 1) / LANES * LANES; c < value_size_; c += LANES) store(change + c, Vec{});
    if (slots_[i].block >= 0)
      copy(change, size, call_.changes + record(call_, slots_[i], call_.change_stride, head, size));
  }

  void fade_keys() {
    const float last = decays_[CHUNK - 1];
    float fading[CHUNK];
    for (int64_t j = 0; j < CHUNK; j += LANES) store(fading + j, exp(last - load(decays_ + j)));
    for (int64_t j = 0; j < CHUNK; ++j)
      for (int64_t k = 0; k < key_size_; k += LANES)
        store(faded_keys_ + j * key_size_ + k, load(keys_[j] + k) * fading[j]);
  }

  // apart_ becomes what is left of the state.
  void fade_channels() {
    std::fill(apart_, apart_ + key_size_, 0.0f);
    for (int64_t j = CHUNK - 1; j >= 0; --j)
      for (int64_t k = 0; k < key_size_; k += LANES) {
        const Vec apart = load(apart_ + k);
        store(faded_keys_ + j * key_size_ + k, load(keys_[j] + k) * exp(apart));
        store(apart_ + k, apart + load(token_decays_[j] + k));
      }
    for (int64_t k = 0; k < key_size_; k += LANES) store(apart_ + k, exp(load(apart_ + k)));
  }

  void next_state(int64_t head) {
    if (call_.decay_gates)
      fade_channels();
    else
      fade_keys();
    auto left = [&](int64_t k) { return splat(call_.decay_gates ? apart_[k] : from_begin_[CHUNK - 1]); };
    float* target = in_state<float>(call_, call_.state_places, head, run_, begin_ + CHUNK);
    constexpr int64_t ROWS = 8;
    for (int64_t k = 0; k < call_.key_dim; k += ROWS) {
      const int64_t rows = std::min(ROWS, call_.key_dim - k);
      multiply({faded_keys_ + k, 1, key_size_}, rows, CHUNK, [&](int64_t j) { return changes_[j]; }, value_size_, sums_);
      for (int64_t r = 0; r < rows; ++r)
        for_vectors(call_.value_dim, [&](int64_t c, int count) {
          Vec next = load(sums_ + r * value_size_ + c);
          if (state_) next = fma(load(state_ + (k + r) * value_size_ + c), left(k + r), next);
          write(target + (k + r) * call_.value_dim + c, next, count);
        });
    }
  }

  const Recur<T>& call_;
  const Run& run_;
  int64_t key_head_, key_size_, value_size_;
  int64_t begin_ = 0, known_ = 0, count_ = 0, row_ = 0;  // of the chunk: tokens before known_ have records
  float *new_rows_, *old_keys_, *faded_keys_, *said_, *own_changes_, *overlaps_, *state_copy_, *sums_, *factors_;
  float *faded_rows_, *own_decays_, *apart_;  // of channels with decays of their own
  const float *keys_[CHUNK], *changes_[CHUNK], *token_decays_[CHUNK], *state_ = nullptr;
  float decays_[CHUNK], betas_[CHUNK], from_begin_[CHUNK];
  Slot slots_[CHUNK];
};

template <class T>
void Recur<T>::run() const {
  const std::vector<Run> runs = runs_of(*this);
  const int64_t shared = num_value_heads / num_key_heads, pairs = int64_t(runs.size()) * num_key_heads;
  if (!pairs) return;
  constexpr int64_t WORTH_A_THREAD = 65536, TASKS = 4;  // products; tasks of each thread
  const int threads = int(std::min<int64_t>(num_threads, 1 + rows * num_value_heads * key_dim * value_dim / WORTH_A_THREAD));
  // Value heads of a key head are computed together, since they share the scores, unless threads would have nothing.
  const int64_t parts = std::clamp<int64_t>((TASKS * threads + pairs - 1) / pairs, 1, threads == 1 ? 1 : shared);
  parallel_tasks(threads, pairs * parts, [&](int64_t task) {
    const int64_t part = task % parts, key_head = task / parts % num_key_heads, first = key_head * shared;
    Walk<T> walk(*this, runs[size_t(task / parts / num_key_heads)], key_head);
    walk.heads(first + shared * part / parts, first + shared * (part + 1) / parts);
  });
}

// Rows in groups: RMSNorm, times the weight, with silu(gate), or the gate's sigmoid. A weight is as long as a row, or as some whole groups.
template <class T>
struct GatedNorm {
  const T* x;
  int64_t x_stride;
  const T* gate;
  int64_t gate_stride;
  const T* weight;
  int64_t weight_size;
  T* out;
  int64_t rows, size, group_size, has_norm, gate_first, sigmoid_only;
  float eps;
  int num_threads;
  QUIRE_ARGUMENTS(x, x_stride, gate, gate_stride, weight, weight_size, out, rows, size, group_size, has_norm,
                  gate_first, sigmoid_only, eps, num_threads)

  void run() const {
    constexpr int64_t PRODUCTS = 32;  // as much work as an exponential
    const int64_t groups = size / group_size;
    parallel_shares(num_threads, rows * groups, group_size * PRODUCTS, [&](int64_t share) {
      thread_local Scratch scratch;
      const int64_t row = share / groups, begin = share % groups * group_size;
      float* gated = scratch.get<float>(size_t(group_size + LANES));
      const T *source = x + row * x_stride + begin, *gates = gate + row * gate_stride + begin;
      const T* factors = weight ? weight + begin % weight_size : nullptr;
      for_vectors(group_size, [&](int64_t i, int count) {
        const Vec v = read(source + i, count);
        store(gated + i, gate_first ? v * factor(gates, i, count) : v);
      });
      float inverse = 1.0f;
      if (has_norm) {
        const float sum = sum_over(gated, group_size, [](Vec v, int, Vec& to) { to = fma(v, v, to); });
        inverse = 1.0f / std::sqrt(sum / float(group_size) + eps);
      }
      for_vectors(group_size, [&](int64_t i, int count) {
        Vec v = load(gated + i);
        if (has_norm) v = round_to<T>(v * inverse);
        if (factors) v *= read(factors + i, count);
        write(out + row * size + begin + i, gate_first ? v : v * factor(gates, i, count), count);
      });
    });
  }

  Vec factor(const T* gates, int64_t i, int count) const {
    const Vec v = read(gates + i, count);
    return sigmoid_only ? sigmoid(v) : v * sigmoid(v);
  }
};

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" {
QUIRE_FUNCTION(convolve_float32, call->run(), Convolve<float>)
QUIRE_FUNCTION(convolve_bfloat16, call->run(), Convolve<bf16>)
QUIRE_FUNCTION(recur_float32, call->run(), Recur<float>)
QUIRE_FUNCTION(recur_bfloat16, call->run(), Recur<bf16>)
QUIRE_FUNCTION(gated_norm_float32, call->run(), GatedNorm<float>)
QUIRE_FUNCTION(gated_norm_bfloat16, call->run(), GatedNorm<bf16>)
}
