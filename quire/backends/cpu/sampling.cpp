// The choice of a token: argmax(logits / temperature + Gumbel noise), or the plain argmax at temperature 0; and
// the largest values of a row, from which filters find their limits.
//
// Most tokens can't win, and that is seen without a logarithm. With v the uniform number behind a token's noise
// -log(-log(1 - v)), the noise is below -log(v), and that is below -ln(2) times the number one gets by reading
// v's bits as an integer (exponent and mantissa: a logarithm drawn in straight lines from below). Only what
// could win by this bound is computed, in double precision, one at a time: a few dozen tokens of a row.
#include <algorithm>
#include <functional>

#include "arguments.h"
#include "simd.h"
#include "threads.h"

namespace quire {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

inline UIntVec mix(UIntVec bits) {
  bits = (bits ^ (bits >> 16)) * 0x7feb352du;
  bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
  return bits ^ (bits >> 16);
}

// The same numbers as quire/kernels/noise.py makes, bit for bit.
inline Vec uniform(UIntVec ids, uint32_t first_key, uint32_t second_key) {
  UIntVec bits = mix(mix((ids * 0x9e3779b1u) ^ first_key) ^ second_key) >> 1;
  Vec v = (__builtin_convertvector((IntVec)bits, Vec) + 0.5f) * 4.656612873077393e-10f;  // 2^-31
  const Vec below_one = splat(1.0f - 5.960464477539063e-08f);
  return v > below_one ? below_one : v;
}

inline float gumbel(float v) { return float(-std::log(-std::log1p(-double(v)))); }

// Above the noise of v, by a margin that covers the rounding of this line.
inline Vec bound(Vec v) {
  Vec bits = __builtin_convertvector((IntVec)v, Vec);
  return fma(bits, splat(-8.2629582e-08f), splat(88.0396919f));  // -ln(2) * (bits / 2^23 - 127), and 0.01 more
}

inline bool any(IntVec mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < LANES; ++i) found |= mask[i];
  return found != 0;
#endif
}

template <class T>
inline Vec read_scores(const T* logits, int64_t count) {
  if (count >= LANES) return load(logits);
  Vec v = splat(-INFINITE);
  for (int i = 0; i < count; ++i) v[i] = read(logits + i, 1)[0];
  return v;
}

constexpr int32_t HAS_NAN = 1, NOTHING_LEFT = 2;  // as in quire/kernels/ops.py

struct Best {
  float score = -INFINITE;
  int64_t id = 0;
  bool has_nan = false;

  int32_t flags() const { return has_nan ? HAS_NAN : score == -INFINITE ? NOTHING_LEFT : 0; }
};

// Of the tokens [begin, end); the lowest id wins among equals, here and below.
template <class T>
Best greedy(const T* logits, int64_t begin, int64_t end) {
  constexpr int AT_ONCE = 4;
  Vec tops[AT_ONCE];
  IntVec unordered[AT_ONCE] = {};
  for (Vec& top : tops) top = splat(-INFINITE);
  for (int64_t i = begin; i < end; i += AT_ONCE * LANES)
    for (int part = 0; part < AT_ONCE && i + part * LANES < end; ++part) {
      Vec scores = read_scores(logits + i + part * LANES, end - i - part * LANES);
      unordered[part] |= scores != scores;
      tops[part] = scores > tops[part] ? scores : tops[part];
    }
  for (int part = 1; part < AT_ONCE; ++part) {
    tops[0] = tops[part] > tops[0] ? tops[part] : tops[0];
    unordered[0] |= unordered[part];
  }
  Best best{max_lanes(tops[0]), begin, any(unordered[0])};
  if (best.score == -INFINITE) return best;
  while (!any(read_scores(logits + best.id, end - best.id) == best.score)) best.id += LANES;
  while (read(logits + best.id, 1)[0] != best.score) ++best.id;
  return best;
}

template <class T>
Best draw(const T* logits, int64_t begin, int64_t end, float temperature, uint32_t first_key, uint32_t second_key) {
  Best best;
  IntVec unordered = {};
  UIntVec ids;
  for (int lane = 0; lane < LANES; ++lane) ids[lane] = uint32_t(begin + lane);
  for (int64_t i = begin; i < end; i += LANES, ids += uint32_t(LANES)) {
    Vec scores = read_scores(logits + i, end - i) / temperature;
    unordered |= scores != scores;
    Vec v = uniform(ids, first_key, second_key);
    IntVec may_win = scores + bound(v) > best.score;
    if (!any(may_win)) continue;
    for (int lane = 0; lane < LANES; ++lane) {
      if (!may_win[lane]) continue;
      float score = scores[lane] + gumbel(v[lane]);
      if (score > best.score) best = {score, i + lane};
    }
  }
  best.has_nan = any(unordered);
  return best;
}

// What a row of logits is drawn with: nothing at temperature 0.
struct Chance {
  float temperature;
  uint32_t first_key, second_key;
};

// Calls take(row, best) for each row of logits; chance(row) says how it is drawn. Pieces of a row go to all threads.
template <class T, class GetChance, class Take>
void choose(int num_threads, const T* logits, int64_t stride, int64_t rows, int64_t size, GetChance chance, Take take) {
  constexpr int64_t PIECE = 8192;
  const int64_t pieces = (size + PIECE - 1) / PIECE;
  thread_local Scratch scratch;
  Best* found = scratch.get<Best>(size_t(rows * pieces));
  parallel_shares(num_threads, rows * pieces, PIECE, [&](int64_t i) {
    const T* own = logits + i / pieces * stride;
    const int64_t begin = i % pieces * PIECE, end = std::min(begin + PIECE, size);
    const Chance by = chance(i / pieces);
    found[i] = by.temperature > 0 ? draw(own, begin, end, by.temperature, by.first_key, by.second_key)
                                  : greedy(own, begin, end);
  });
  for (int64_t row = 0; row < rows; ++row) {
    Best best;
    for (int64_t i = row * pieces; i < (row + 1) * pieces; ++i) {
      const bool has_nan = best.has_nan || found[i].has_nan;
      if (found[i].score > best.score) best = found[i];
      best.has_nan = has_nan;
    }
    if (best.flags()) best.id = 0;
    take(row, best);
  }
}

struct GumbelArgmax {
  const float* logits;
  int64_t stride;
  const float* temperature;
  const uint32_t* keys;
  int64_t* out;
  int32_t* flags;
  int64_t rows, size;
  int num_threads;
  QUIRE_ARGUMENTS(logits, stride, temperature, keys, out, flags, rows, size, num_threads)

  void run() const {
    auto chance = [&](int64_t row) { return Chance{temperature[row], keys[2 * row], keys[2 * row + 1]}; };
    choose(num_threads, logits, stride, rows, size, chance, [&](int64_t row, const Best& best) {
      out[row] = best.id;
      flags[row] = best.flags();
    });
  }
};

inline uint64_t mix64(uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

// The same with everything that stands in the request rows, where the tokens are written too. Keys are those of
// quire/kernels/noise.py. A row without a request has no token.
template <class T>
struct SampleRows {
  const T* logits;
  int64_t stride;
  const int32_t* row_index;
  const uint64_t* seeds;
  const float* temperatures;
  const int32_t* positions;
  int64_t* token_ids;
  int64_t tokens_stride;
  int64_t *out, *flags;
  int64_t rows, size;
  int num_threads;
  QUIRE_ARGUMENTS(logits, stride, row_index, seeds, temperatures, positions, token_ids, tokens_stride, out, flags,
                  rows, size, num_threads)

  void run() const {
    auto chance = [&](int64_t row) {
      if (row_index[row] < 0) return Chance{};
      const uint64_t key = mix64(mix64(seeds[row_index[row]]) + uint64_t(positions[row]));
      return Chance{temperatures[row_index[row]], uint32_t(key), uint32_t(key >> 32)};
    };
    choose(num_threads, logits, stride, rows, size, chance, [&](int64_t row, const Best& best) {
      if (row_index[row] < 0) return;
      out[row] = token_ids[row_index[row] * tokens_stride + positions[row]] = best.id;
      flags[row] = best.flags();
    });
  }
};

// Values above `limit` are collected; when the buffer is full, only the k largest stay and the limit rises. A
// value that equals the limit needn't come in: it is there k times over.
class Largest {
 public:
  Largest(float* buffer, int64_t capacity, int64_t k) : buffer_(buffer), capacity_(capacity), k_(k) {}

  void add(Vec values) {
    IntVec higher = values > limit_;
    if (!any(higher)) return;
    if (count_ + LANES > capacity_) {
      shrink();
      higher = values > limit_;
    }
    for (int lane = 0; lane < LANES; ++lane) {
      buffer_[count_] = values[lane];
      count_ += higher[lane] != 0;
    }
  }

  void write(float* out) {
    if (count_ > k_) shrink();
    std::sort(buffer_, buffer_ + count_, std::greater<float>());
    std::copy(buffer_, buffer_ + count_, out);
    std::fill(out + count_, out + k_, -INFINITE);
  }

 private:
  void shrink() {
    std::nth_element(buffer_, buffer_ + k_ - 1, buffer_ + count_, std::greater<float>());
    limit_ = buffer_[k_ - 1];
    count_ = k_;
  }

  float* buffer_;
  int64_t capacity_, k_, count_ = 0;
  float limit_ = -INFINITE;
};

struct TopValues {
  const float* x;
  int64_t stride;
  float* out;
  int64_t rows, size, k;
  int num_threads;
  QUIRE_ARGUMENTS(x, stride, out, rows, size, k, num_threads)

  void run() const {
    parallel_shares(num_threads, rows, size, [&](int64_t row) {
      static thread_local Scratch scratch;
      const int64_t capacity = 4 * k + 4 * LANES;
      Largest largest(scratch.get<float>(size_t(capacity) + LANES), capacity, k);
      for (int64_t i = 0; i < size; i += LANES) largest.add(read_scores(x + row * stride + i, size - i));
      largest.write(out + row * k);
    });
  }
};

struct KeepBetween {
  float* x;
  int64_t stride;
  const float *low, *high;
  int64_t rows, size;
  int num_threads;
  QUIRE_ARGUMENTS(x, stride, low, high, rows, size, num_threads)

  void run() const {
    parallel_shares(num_threads, rows, size, [&](int64_t row) {
      float* own = x + row * stride;
      const Vec never = splat(-INFINITE), lowest = splat(low[row]), highest = splat(high[row]);
      for (int64_t i = 0; i < size; i += LANES) {
        Vec v = read_scores(own + i, size - i);
        v = v < lowest ? never : v;
        v = v > highest ? never : v;
        write(own + i, v, size - i);
      }
    });
  }
};

}  // namespace
}  // namespace quire

extern "C" {
QUIRE_FUNCTION(keep_between, call->run(), quire::KeepBetween)
QUIRE_FUNCTION(gumbel_argmax, call->run(), quire::GumbelArgmax)
QUIRE_FUNCTION(sample_rows_float32, call->run(), quire::SampleRows<float>)
QUIRE_FUNCTION(sample_rows_bfloat16, call->run(), quire::SampleRows<quire::bf16>)
QUIRE_FUNCTION(top_values, call->run(), quire::TopValues)
}
