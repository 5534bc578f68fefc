// Everything that works on one row at a time: norms, rotary embedding, activations, writing the cache. Each function
// takes the address of its arguments, a struct that `functions.py` declares for Python.
#include "arguments.h"
#include "simd.h"
#include "threads.h"
#include "vectors.h"

namespace quire {
namespace {

template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t size, float eps, float offset) {
  const float sum = sum_over(x, size, [](Vec v, int, Vec& to) { to = fma(v, v, to); });
  float inverse = 1.0f / std::sqrt(sum / float(size) + eps);
  for_vectors(size, [&](int64_t i, int count) {
    Vec normed = read(x + i, count) * inverse, factor = read(weight + i, count);
    if (offset == 0.0f) write(out + i, round_to<T>(normed) * factor, count);
    else write(out + i, normed * (factor + offset), count);
  });
}

// LayerNorm: the mean is subtracted first, nothing is rounded on the way. `bias` is null for none.
template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, T* out, int64_t size, float eps) {
  const float mean = sum_over(x, size, [](Vec v, int, Vec& to) { to += v; }) / float(size);
  const float squares = sum_over(x, size, [&](Vec v, int count, Vec& to) {
    v -= mean;
    for (int i = count; i < LANES; ++i) v[i] = 0.0f;
    to = fma(v, v, to);
  });
  const float inverse = 1.0f / std::sqrt(squares / float(size) + eps);
  for_vectors(size, [&](int64_t i, int count) {
    Vec normed = (read(x + i, count) - mean) * inverse * read(weight + i, count);
    write(out + i, bias ? normed + read(bias + i, count) : normed, count);
  });
}

// Rows come in groups of `inner` that lie one after the other, groups `stride` elements apart.
template <class T>
struct RmsNorm {
  const T* x;
  int64_t stride, inner;
  const T* weight;
  T* out;
  int64_t rows, size;
  float eps, offset;
  int num_threads;
  QUIRE_ARGUMENTS(x, stride, inner, weight, out, rows, size, eps, offset, num_threads)

  void run() const {
    parallel_shares(num_threads, rows, size, [&](int64_t row) {
      norm_row(x + row / inner * stride + row % inner * size, weight, out + row * size, size, eps, offset);
    });
  }
};

template <class T>
struct LayerNorm {
  const T *x, *weight, *bias;
  T* out;
  int64_t rows, size;
  float eps;
  int num_threads;
  QUIRE_ARGUMENTS(x, weight, bias, out, rows, size, eps, num_threads)

  void run() const {
    parallel_shares(num_threads, rows, size, [&](int64_t row) {
      layer_norm_row(x + row * size, weight, bias, out + row * size, size, eps);
    });
  }
};

// x * scale, rounded, + other (null for none), number by number.
template <class T>
struct ScaleAdd {
  const T *x, *other;
  T* out;
  int64_t rows, size;
  float scale;
  int num_threads;
  QUIRE_ARGUMENTS(x, other, out, rows, size, scale, num_threads)

  void run() const {
    parallel_shares(num_threads, rows, size, [&](int64_t row) {
      for_vectors(size, [&](int64_t i, int count) {
        const int64_t at = row * size + i;
        Vec scaled = read(x + at, count) * scale;
        write(out + at, other ? round_to<T>(scaled) + read(other + at, count) : scaled, count);
      });
    });
  }
};

// x * other, number by number.
template <class T>
struct Multiply {
  const T* x;
  int64_t x_stride;
  const T* other;
  int64_t other_stride;
  T* out;
  int64_t rows, size;
  int num_threads;
  QUIRE_ARGUMENTS(x, x_stride, other, other_stride, out, rows, size, num_threads)

  void run() const {
    parallel_shares(num_threads, rows, size, [&](int64_t row) {
      const T *a = x + row * x_stride, *b = other + row * other_stride;
      for_vectors(size, [&](int64_t i, int count) {
        write(out + row * size + i, read(a + i, count) * read(b + i, count), count);
      });
    });
  }
};

// Each row times one of the factors: that number `which` of the row, or the first where it is null.
template <class T>
struct ScaleRows {
  const T* x;
  int64_t stride;
  const float* factors;
  const int64_t* which;
  T* out;
  int64_t rows, size;
  int num_threads;
  QUIRE_ARGUMENTS(x, stride, factors, which, out, rows, size, num_threads)

  void run() const {
    parallel_shares(num_threads, rows, size, [&](int64_t row) {
      const float factor = factors[which ? which[row] : 0];
      for_vectors(size, [&](int64_t i, int count) {
        write(out + row * size + i, read(x + row * stride + i, count) * factor, count);
      });
    });
  }
};

// sigmoid(gate), rounded, * x; a row has gates for all its numbers, or one.
template <class T>
struct SigmoidMul {
  const T* gate;
  int64_t gate_stride, gate_size;
  const T* x;
  int64_t x_stride;
  T* out;
  int64_t rows, size;
  int num_threads;
  QUIRE_ARGUMENTS(gate, gate_stride, gate_size, x, x_stride, out, rows, size, num_threads)

  void run() const {
    constexpr int64_t PRODUCTS = 32;  // as much work as an exponential
    parallel_shares(num_threads, rows, size * PRODUCTS, [&](int64_t row) {
      const T *gates = gate + row * gate_stride, *source = x + row * x_stride;
      const bool is_one = gate_size == 1;
      const Vec only = is_one ? splat(read(gates, 1)[0]) : Vec{};
      for_vectors(size, [&](int64_t i, int count) {
        const Vec factor = 1.0f / (1.0f + exp(-(is_one ? only : read(gates + i, count))));
        write(out + row * size + i, round_to<T>(factor) * read(source + i, count), count);
      });
    });
  }
};

template <class T>
struct SoftCap {
  T* x;
  int64_t stride, rows, size;
  float cap;
  int num_threads;
  QUIRE_ARGUMENTS(x, stride, rows, size, cap, num_threads)

  void run() const {
    parallel_shares(num_threads, rows, size, [&](int64_t row) {
      for_vectors(size, [&](int64_t i, int count) {
        T* at = x + row * stride + i;
        write(at, soft_capped(read(at, count), cap), count);
      });
    });
  }
};

template <class T>
struct Clamp {
  T* x;
  int64_t stride, rows, size;
  float limit;
  int num_threads;
  QUIRE_ARGUMENTS(x, stride, rows, size, limit, num_threads)

  void run() const {
    const Vec high = splat(limit), low = splat(-limit);
    parallel_shares(num_threads, rows, size, [&](int64_t row) {
      for_vectors(size, [&](int64_t i, int count) {
        T* at = x + row * stride + i;
        const Vec v = read(at, count), capped = v > high ? high : v;  // NaN is neither above nor below
        write(at, capped < low ? low : capped, count);
      });
    });
  }
};

template <class T>
struct AddRmsNorm {
  const T *x, *residual, *weight;
  T *out, *total;
  int64_t rows, size;
  float eps, offset;
  int num_threads;
  QUIRE_ARGUMENTS(x, residual, weight, out, total, rows, size, eps, offset, num_threads)

  void run() const {
    parallel_shares(num_threads, rows, size, [&](int64_t row) {
      const T *a = x + row * size, *b = residual + row * size;
      T* sum = total + row * size;
      for_vectors(size, [&](int64_t i, int count) { write(sum + i, read(a + i, count) + read(b + i, count), count); });
      norm_row(sum, weight, out + row * size, size, eps, offset);
    });
  }
};

// Rope of one head: dimension i pairs with i + size / 2.
template <class T>
void turn(const T* source, const float* cosines, T* target, int64_t size) {
  const int64_t half = size / 2;
  const float* sines = cosines + half;
  for_vectors(half, [&](int64_t i, int count) {
    Vec first = read(source + i, count), second = read(source + half + i, count);
    Vec cosine = read(cosines + i, count), sine = read(sines + i, count);
    write(target + i, first * cosine - second * sine, count);
    write(target + half + i, second * cosine + first * sine, count);
  });
}

template <class T>
struct Rope {
  const T* x;
  int64_t stride;
  const int64_t* positions;
  const float* cos_sin;
  T* out;
  int64_t rows, heads, head_dim;
  int num_threads;
  QUIRE_ARGUMENTS(x, stride, positions, cos_sin, out, rows, heads, head_dim, num_threads)

  void run() const {
    parallel_shares(num_threads, rows, heads * head_dim, [&](int64_t row) {
      for (int64_t head = 0; head < heads; ++head)
        turn(x + row * stride + head * head_dim, cos_sin + positions[row] * head_dim,
             out + (row * heads + head) * head_dim, head_dim);
    });
  }
};

// A row's latent, normed, with its rotated numbers behind it; and its queries, absorbed, with theirs.
template <class T>
struct LatentHeads {
  const T *absorbed, *rotated;
  int64_t rotated_stride, rotated_head_stride;
  const T* latent;
  int64_t latent_stride;
  const T* weight;
  const int64_t* positions;
  const float* cos_sin;
  T *query, *key;
  int64_t rows, heads, rank, rope_dim;
  float eps;
  int num_threads;
  QUIRE_ARGUMENTS(absorbed, rotated, rotated_stride, rotated_head_stride, latent, latent_stride, weight, positions, cos_sin,
                  query, key, rows, heads, rank, rope_dim, eps, num_threads)

  void run() const {
    const int64_t size = rank + rope_dim;
    parallel_shares(num_threads, rows, heads * size, [&](int64_t row) {
      const T* source = latent + row * latent_stride;
      norm_row(source, weight, key + row * size, rank, eps, 0.0f);
      place(row, source + rank, key + row * size + rank);
      for (int64_t head = 0; head < heads; ++head) {
        T* target = query + (row * heads + head) * size;
        std::memcpy(static_cast<void*>(target), absorbed + (row * heads + head) * rank, size_t(rank) * sizeof(T));
        place(row, rotated + row * rotated_stride + head * rotated_head_stride, target + rank);
      }
    });
  }

  void place(int64_t row, const T* numbers, T* target) const {
    if (cos_sin)
      turn(numbers, cos_sin + positions[row] * rope_dim, target, rope_dim);
    else
      std::memcpy(static_cast<void*>(target), numbers, size_t(rope_dim) * sizeof(T));
  }
};

#define QUIRE_ACTIVATIONS SILU, GELU_TANH, CLAMPED_SWIGLU, RELU2, GELU, RELU  // as in `functions.py`
enum Activation : int64_t { QUIRE_ACTIVATIONS };

// activation(gate) * up of rows [gate | up]; or of rows without up, activation(x).
template <class T>
struct Activate {
  const T* x;
  int64_t stride;
  T* out;
  int64_t rows, size, activation, gated;
  int num_threads;
  QUIRE_ARGUMENTS(x, stride, out, rows, size, activation, gated, num_threads)

  void run() const {
    switch (activation) {
      case SILU: return run([](Vec v) { return v / (1.0f + exp(-v)); });
      case GELU_TANH: return run([](Vec v) {  // (1 + tanh(y)) / 2 is the sigmoid of 2y
        return v / (1.0f + exp(-1.5957691216f * (v + 0.044715f * v * v * v)));
      });
      case RELU2: return run([](Vec v) {
        Vec positive = v < 0.0f ? splat(0.0f) : v;
        return positive * positive;
      });
      case RELU: return run([](Vec v) { return v < 0.0f ? splat(0.0f) : v; });
      case GELU: return run([](Vec v) {  // by the error function: see `kernels/elementwise.py`
        Vec size = v < 0.0f ? -v : v, part = 1.0f / (1.0f + 0.2316418882f * size);
        Vec lacking = splat(1.061405429f) * part;
        lacking = (lacking - 1.453152027f) * part;
        lacking = (lacking + 1.421413741f) * part;
        lacking = (lacking - 0.284496736f) * part;
        lacking = (lacking + 0.254829592f) * part;
        return (v < 0.0f ? splat(0.0f) : v) - 0.5f * size * lacking * exp(-0.5f * v * v);
      });
      default: return run([](Vec v) { return v / (1.0f + exp(-1.702f * v)); });
    }
  }

  template <class Function>
  void run(Function function) const {
    // A row is cut: an exponential is as much work as some dozen products, and with one request nobody else works.
    constexpr int64_t PIECE = 256, PRODUCTS = 32;
    const float limit = 7.0f;
    const int64_t pieces = (size + PIECE - 1) / PIECE;
    parallel_shares(num_threads, rows * pieces, PIECE * PRODUCTS, [&](int64_t share) {
      const int64_t row = share / pieces, begin = share % pieces * PIECE;
      const T *source = x + row * stride + begin, *up = source + size;
      for_vectors(std::min(PIECE, size - begin), [&](int64_t i, int count) {
        Vec v = read(source + i, count);
        if (activation == CLAMPED_SWIGLU) v = v > limit ? splat(limit) : v;
        Vec result = round_to<T>(function(v));
        if (gated) {
          Vec factor = read(up + i, count);
          if (activation == CLAMPED_SWIGLU) {
            factor = factor > limit ? splat(limit) : factor;
            factor = round_to<T>((factor < -limit ? splat(-limit) : factor) + 1.0f);
          }
          result *= factor;
        }
        write(out + row * size + begin + i, result, count);
      });
    });
  }
};

// The activation with two numbers of its own, each given as a with log(1 + e^a).
template <class T>
struct Xielu {
  const T* x;
  int64_t stride;
  const float *positive, *negative;
  T* out;
  int64_t rows, size;
  int num_threads;
  QUIRE_ARGUMENTS(x, stride, positive, negative, out, rows, size, num_threads)

  static float softplus(float a) { return std::max(a, 0.0f) + std::log1p(std::exp(-std::fabs(a))); }

  void run() const {
    constexpr int64_t PRODUCTS = 32;  // as much work as an exponential
    const float p = softplus(*positive), n = softplus(*negative) + 0.5f;
    parallel_shares(num_threads, rows, size * PRODUCTS, [&](int64_t row) {
      for_vectors(size, [&](int64_t i, int count) {
        const Vec v = read(x + row * stride + i, count), above = p * v * v;
        const Vec below = (exp(v > 0.0f ? splat(0.0f) : v) - 1.0f - v) * n;
        write(out + row * size + i, (v > 0.0f ? above : below) + 0.5f * v, count);
      });
    });
  }
};

// Where a token's numbers of one head go, in a block by token or by dimension.
struct HeadInBlock {
  int64_t start, step;

  HeadInBlock(int64_t head_start, int64_t offset, int64_t block_size, int64_t head_dim, bool by_dimension)
      : start(head_start + (by_dimension ? offset : offset * head_dim)),
        step(by_dimension ? block_size : 1) {}

  template <class T>
  void write(const T* numbers, int64_t count, T* cache) const {
    if (step == 1)
      std::memcpy(cache + start, numbers, size_t(count) * sizeof(T));
    else
      for (int64_t i = 0; i < count; ++i) cache[start + i * step] = numbers[i];
  }
};

// A head's numbers as they are.
template <class T>
void write_head(const T* x, int64_t size, HeadInBlock place, T* cache, float*, int64_t, float) {
  place.write(x, size, cache);
}

// As bytes, with a scale: NaN where some are not finite.
template <class T>
void write_head(const T* x, int64_t size, HeadInBlock place, int8_t* cache, float* scales, int64_t token, float) {
  Vec highest{}, zero{};
  for_vectors(size, [&](int64_t i, int count) {
    Vec v = read(x + i, count);
    highest = maximum(highest, v < 0.0f ? -v : v);
    zero += v - v;  // NaN for what is not finite
  });
  const float scale = max_lanes(highest) / 127.0f + sum_lanes(zero), divisor = scale > 0.0f ? scale : 1.0f;
  int8_t* out = cache + place.start;
  for_vectors(size, [&](int64_t i, int count) {
    Vec v = round_to_whole(read(x + i, count) / divisor);  // in range but where the scale is denormal
    for (int j = 0; j < count; ++j)
      out[(i + j) * place.step] = int8_t(scale == scale ? std::fmin(std::fmax(v[j], -127.0f), 127.0f) : 0);
  });
  scales[token] = scale;
}

// As FP8 numbers, divided by the scale of all of them.
template <class T>
void write_head(const T* x, int64_t size, HeadInBlock place, fp8* cache, float*, int64_t, float scale) {
  for_vectors(size, [&](int64_t i, int count) {
    fp8 some[LANES];
    store(some, read(x + i, count) / scale);
    for (int j = 0; j < count; ++j) cache[place.start + (i + j) * place.step] = some[j];
  });
}

// Keys and values of T into a cache of CACHED: int8_t has a scale for each token and head, fp8 one for all keys and one
// for all values. From block to block there are block_stride keys or values, and scale_stride scales.
template <class T, class CACHED = T>
struct WriteKv {
  const T* keys;
  int64_t keys_stride;
  const T* values;
  int64_t values_stride;
  CACHED *key_cache, *value_cache;
  float *key_scales, *value_scales;
  float key_scale, value_scale;
  const int64_t* slots;
  int64_t rows, heads, block_size, head_dim, block_stride, scale_stride, keys_by_dimension;
  int num_threads;
  QUIRE_ARGUMENTS(keys, keys_stride, values, values_stride, key_cache, value_cache, key_scales, value_scales,
                  key_scale, value_scale, slots, rows, heads, block_size, head_dim, block_stride, scale_stride,
                  keys_by_dimension, num_threads)

  void run() const {
    parallel_shares(num_threads, rows, heads * head_dim, [&](int64_t row) {
      if (slots[row] < 0) return;  // padding
      int64_t block = slots[row] / block_size, offset = slots[row] % block_size;
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t place = block * scale_stride + head * block_size + offset, at = head * head_dim;
        const int64_t head_start = block * block_stride + head * block_size * head_dim;
        HeadInBlock key(head_start, offset, block_size, head_dim, keys_by_dimension);
        HeadInBlock value(head_start, offset, block_size, head_dim, false);
        write_head(keys + row * keys_stride + at, head_dim, key, key_cache, key_scales, place, key_scale);
        write_head(values + row * values_stride + at, head_dim, value, value_cache, value_scales, place, value_scale);
      }
    });
  }
};

// For each token of a step, by request row and position: its id, its position and its slot in the cache.
struct GatherInputs {
  const int32_t *rows, *positions;
  const int64_t* token_ids;
  int64_t tokens_stride;
  const int32_t* block_tables;
  int64_t tables_stride;
  int64_t *ids, *places, *slots;
  int64_t count, block_size;
  QUIRE_ARGUMENTS(rows, positions, token_ids, tokens_stride, block_tables, tables_stride, ids, places, slots, count,
                  block_size)

  void run() const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = rows[i] < 0 ? 0 : rows[i], place = positions[i];
      const int64_t block = block_tables[row * tables_stride + place / block_size];
      ids[i] = rows[i] < 0 ? 0 : token_ids[row * tokens_stride + place];
      places[i] = place;
      slots[i] = rows[i] < 0 ? -1 : block * block_size + place % block_size;
    }
  }
};

// Calls that were made before, with the same arguments.
struct Replay {
  struct Call {
    void (*function)(const void*);
    const void* arguments;
    QUIRE_ARGUMENTS(function, arguments)
  };
  const Call* calls;
  int64_t count;
  QUIRE_ARGUMENTS(calls, count)

  void run() const {
    for (int64_t i = 0; i < count; ++i) calls[i].function(calls[i].arguments);
  }
};

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" {
QUIRE_FUNCTION(rms_norm_float32, call->run(), RmsNorm<float>)
QUIRE_FUNCTION(rms_norm_bfloat16, call->run(), RmsNorm<bf16>)
QUIRE_FUNCTION(add_rms_norm_float32, call->run(), AddRmsNorm<float>)
QUIRE_FUNCTION(add_rms_norm_bfloat16, call->run(), AddRmsNorm<bf16>)
QUIRE_FUNCTION(rope_float32, call->run(), Rope<float>)
QUIRE_FUNCTION(rope_bfloat16, call->run(), Rope<bf16>)
QUIRE_FUNCTION(latent_heads_float32, call->run(), LatentHeads<float>)
QUIRE_FUNCTION(latent_heads_bfloat16, call->run(), LatentHeads<bf16>)
QUIRE_FUNCTION(activate_float32, call->run(), Activate<float>)
QUIRE_FUNCTION(activate_bfloat16, call->run(), Activate<bf16>)
QUIRE_FUNCTION(layer_norm_float32, call->run(), LayerNorm<float>)
QUIRE_FUNCTION(layer_norm_bfloat16, call->run(), LayerNorm<bf16>)
QUIRE_FUNCTION(scale_add_float32, call->run(), ScaleAdd<float>)
QUIRE_FUNCTION(scale_add_bfloat16, call->run(), ScaleAdd<bf16>)
QUIRE_FUNCTION(xielu_float32, call->run(), Xielu<float>)
QUIRE_FUNCTION(xielu_bfloat16, call->run(), Xielu<bf16>)
QUIRE_FUNCTION(scale_rows_float32, call->run(), ScaleRows<float>)
QUIRE_FUNCTION(scale_rows_bfloat16, call->run(), ScaleRows<bf16>)
QUIRE_FUNCTION(multiply_float32, call->run(), Multiply<float>)
QUIRE_FUNCTION(multiply_bfloat16, call->run(), Multiply<bf16>)
QUIRE_FUNCTION(sigmoid_mul_float32, call->run(), SigmoidMul<float>)
QUIRE_FUNCTION(sigmoid_mul_bfloat16, call->run(), SigmoidMul<bf16>)
QUIRE_FUNCTION(soft_cap_float32, call->run(), SoftCap<float>)
QUIRE_FUNCTION(soft_cap_bfloat16, call->run(), SoftCap<bf16>)
QUIRE_FUNCTION(clamp_float32, call->run(), Clamp<float>)
QUIRE_FUNCTION(clamp_bfloat16, call->run(), Clamp<bf16>)
QUIRE_FUNCTION(gather_inputs, call->run(), GatherInputs)
QUIRE_DESCRIBE(replayed_call, Replay::Call)
QUIRE_FUNCTION(replay, call->run(), Replay)
QUIRE_NAMES(activations, QUIRE_ACTIVATIONS)
QUIRE_FUNCTION(write_kv_float32, call->run(), WriteKv<float>)
QUIRE_FUNCTION(write_kv_bfloat16, call->run(), WriteKv<bf16>)
QUIRE_FUNCTION(write_kv_int8_float32, call->run(), WriteKv<float, int8_t>)
QUIRE_FUNCTION(write_kv_int8_bfloat16, call->run(), WriteKv<bf16, int8_t>)
QUIRE_FUNCTION(write_kv_fp8_float32, call->run(), WriteKv<float, fp8>)
QUIRE_FUNCTION(write_kv_fp8_bfloat16, call->run(), WriteKv<bf16, fp8>)
}
