// Runs the CPU kernels of a quantised model on numbers of its own and prints a digest of what each computes. Built for
// different instruction sets, and run under an emulator where the machine is another, it must print the same lines.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

extern "C" {
void quire_packed_size(const void*);
void quire_pack_quantized(const void*);
void quire_unpack_quantized(const void*);
void quire_linear_quantized_float32(const void*);
void quire_linear_float32(const void*);
void quire_pack_float32(const void*);
void quire_rms_norm_float32(const void*);
void quire_layer_norm_float32(const void*);
void quire_scale_add_float32(const void*);
void quire_soft_cap_float32(const void*);
void quire_clamp_float32(const void*);
void quire_activate_float32(const void*);
void quire_rope_float32(const void*);
void quire_multiply_float32(const void*);
void quire_sigmoid_mul_float32(const void*);
void quire_gated_norm_float32(const void*);
void quire_convolve_float32(const void*);
void quire_recur_float32(const void*);
void quire_add_low_rank_float32(const void*);
void quire_add_low_rank_bfloat16(const void*);
void quire_attention_float32(const void*);
void quire_attention_int8_float32(const void*);
void quire_attention_fp8_float32(const void*);
}

static uint32_t state = 1;
static uint32_t next() {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}
static float number() { return float(int(next() % 20001) - 10000) / 4096.0f; }
static std::vector<float> numbers(size_t count) {
  std::vector<float> v(count);
  for (float& x : v) x = number();
  return v;
}
template <class T>
static void print(const char* name, const std::vector<T>& v) {
  uint64_t hash = 1469598103934665603u;
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(v.data());
  for (size_t i = 0; i < v.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  std::printf("%s %016llx\n", name, static_cast<unsigned long long>(hash));
}

template <class T>
static std::vector<T> stored(size_t count) {
  std::vector<T> v(count);
  for (T& x : v) {
    const float value = number();
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits >>= 32 - 8 * sizeof(T);  // of bfloat16 the upper half
    std::memcpy(&x, &bits, sizeof(T));
  }
  return v;
}

// Rows of two adapters and of none, with factors and without; segments, strips of ranks and panels don't come out even.
template <class T>
static void adapters(void (*add)(const void*), const char* name) {
  struct Part {
    int64_t first, count, first_rank, rank;
    const void *b, *factor, *offset;
  };
  struct Slot {
    const void *a, *scale;
    int64_t ranks, num_parts;
    const Part* parts;
  };
  const int64_t rows = 9, depth = 566, columns = 150;
  const std::vector<T> x = stored<T>(size_t(rows * depth)), a = stored<T>(size_t(2 * depth * 32)), b = stored<T>(64 * 160);
  const std::vector<float> scale = numbers(64), factors = numbers(320);
  const Part parts[] = {{0, 90, 0, 16, b.data(), nullptr, nullptr},
                        {90, 60, 16, 5, b.data() + 96 * 16, nullptr, nullptr},
                        {3, 147, 0, 27, b.data() + 96 * 16, factors.data(), factors.data() + 160}};
  const Slot table[] = {{a.data(), scale.data(), 32, 2, parts}, {}, {a.data() + depth * 32, scale.data() + 32, 32, 1, parts + 2}};
  const std::vector<int32_t> slots = {0, 2, -1, 2, 0, 1, 2, 2, 2};
  for (int threads : {1, 3}) {
    std::vector<T> out = x;
    struct {
      const void* x;
      int64_t x_stride;
      void* out;
      int64_t out_stride;
      const void *slots, *table;
      int64_t num_slots, rows, columns, depth;
      int threads;
    } call{x.data(), depth, out.data(), depth, slots.data(), table, 3, rows, columns, depth, threads};
    add(&call);
    print(name, out);
  }
}

// One sequence of 150 tokens in steps that end in the middle of chunks, through a convolution and a recurrence.
static void recurrences() {
  const char* names[] = {"delta rule", "state space", "delta rule with decays of channels"};
  for (int kind = 0; kind < 3; ++kind)
    for (int64_t key_dim : {32, 20}) {
      const int64_t is_delta = kind != 1, has_channels = kind == 2;
      const int64_t key_heads = 2, value_heads = 4, value_dim = key_dim + 16, taps = 4, length = 150, blocks = 10;
      const int64_t query = key_heads * key_dim, value = value_heads * value_dim, channels = 2 * query + value;
      const std::vector<float> x = numbers(size_t(length * channels)), gates = numbers(size_t(length * 2 * value_heads));
      const std::vector<float> taps_weight = numbers(size_t(channels * taps));
      const int64_t num_decays = value_heads * (has_channels ? key_dim : 1);
      const std::vector<float> rates = numbers(size_t(2 * value_heads + num_decays));
      const std::vector<float> decay_gates = numbers(size_t(has_channels ? length * num_decays : 0));
      std::vector<float> inputs(size_t(blocks * 16 * channels)), keys(size_t(blocks * 16 * query));
      std::vector<float> changes(size_t(blocks * 16 * value)), decays(size_t(blocks * 16 * num_decays));
      std::vector<float> states(size_t(2 * value * key_dim)), tails(size_t(2 * 3 * channels)), all;
      std::vector<int64_t> state_places, tail_places, slots;
      auto place = [](std::vector<int64_t>& places, std::vector<float>& memory, int64_t heads, int64_t size) {
        for (int64_t head = 0; head < heads; ++head)
          for (int64_t number : {int64_t(0), int64_t(memory.data() + head * size), heads * size * 4}) places.push_back(number);
      };
      place(state_places, states, value_heads, key_dim * value_dim);
      place(tail_places, tails, 3, channels);
      std::vector<int32_t> table, zero = {0}, state_table = {0, 1};
      for (int32_t i = 0; i < blocks; ++i) table.push_back(i * 3 % int32_t(blocks));
      for (int64_t i = 0; i < length; ++i) slots.push_back(table[size_t(i / 16)] * 16 + i % 16);
      const int64_t ends[] = {0, 70, 71, 127, 130, 150};
      for (int step = 0; step < 5; ++step) {
        const int64_t first = ends[step], rows = ends[step + 1] - first;
        std::vector<int32_t> starts = {0, int32_t(rows)}, lengths = {int32_t(first + rows)};
        std::vector<float> mixed(size_t(rows * channels)), out(size_t(rows * value));
        struct {
          const void* x;
          int64_t x_stride;
          const void *weight, *bias;
          void *out, *inputs;
          const void *tails, *query_start, *context_lens, *block_tables, *table_rows, *slots, *state_tables;
          int64_t rows, num_sequences, max_blocks, num_tables, state_blocks, channels, taps, block_size, block_stride, silu;
          int threads;
        } convolve{x.data() + first * channels, channels, taps_weight.data(), is_delta ? nullptr : gates.data(),
                   mixed.data(), inputs.data(), tail_places.data(), starts.data(), lengths.data(), table.data(),
                   zero.data(), slots.data() + first, state_table.data(), rows, 1, blocks, 1, 1, channels, taps, 16,
                   16 * channels, 1, 1};
        quire_convolve_float32(&convolve);
        struct {
          const void* mixed;
          int64_t mixed_stride;
          const void* gates;
          int64_t gates_stride;
          const void* decay_gates;
          int64_t decay_gates_stride;
          const void *log_rate, *time_bias, *skip;
          void *out, *keys, *changes, *decays;
          const void *places, *query_start, *context_lens, *block_tables, *table_rows, *slots, *state_tables;
          int64_t rows, num_sequences, max_blocks, num_tables, state_blocks, key_heads, value_heads, key_dim, value_dim;
          int64_t block_size, key_stride, change_stride, decay_stride, is_delta;
          float least, largest, beta_scale;
          int threads;
        } recur{mixed.data(), channels, gates.data() + first * 2 * value_heads, 2 * value_heads,
                has_channels ? decay_gates.data() + first * num_decays : nullptr, num_decays, rates.data(),
                rates.data() + value_heads, is_delta ? nullptr : rates.data() + 2 * value_heads, out.data(), keys.data(),
                changes.data(), decays.data(), state_places.data(), starts.data(), lengths.data(), table.data(),
                zero.data(), slots.data() + first, state_table.data(), rows, 1, blocks, 1, 1, key_heads, value_heads,
                key_dim, value_dim, 16, 16 * query, 16 * value, 16 * num_decays, is_delta, 0.001f, 4.0f, 1.5f, 1};
        quire_recur_float32(&recur);
        all.insert(all.end(), mixed.begin(), mixed.end());
        all.insert(all.end(), out.begin(), out.end());
      }
      all.insert(all.end(), states.begin(), states.end());
      print(names[kind], all);
    }
}

int main() {
  const char* names[] = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "INT8", "MXFP4"};
  const int64_t elements[] = {32, 32, 32, 32, 32, 256, 256, 256, 32, 32},
                sizes[] = {18, 20, 22, 24, 34, 144, 176, 210, 32, 17};
  const int64_t columns = 41, depth = 768, rows = 13;
  std::vector<float> x = numbers(size_t(rows * depth)), scales = numbers(size_t(columns));
  for (int64_t format = 0; format < 10; ++format) {
    const int64_t row_bytes = depth / elements[format] * sizes[format];
    std::vector<uint8_t> stored(size_t(columns * row_bytes));
    for (size_t i = 0; i < stored.size(); ++i) stored[i] = uint8_t(next());
    for (int64_t block = 0; format < 8 && block < columns * depth / elements[format]; ++block) {
      uint8_t* at = stored.data() + block * sizes[format];
      for (int i = 0; i < 2; ++i) {  // float16 numbers between 2^-6 and 2^-3, of both signs
        uint16_t half = uint16_t(0x2400 + next() % 0x0c00 + (next() % 2 << 15));
        std::memcpy(format == 7 ? at + 208 : at + 2 * i, &half, 2);
      }
    }
    for (size_t i = 0; format == 9 && i < stored.size(); i += 17) stored[i] = uint8_t(i % 34 ? i % 3 : 110 + i % 9);
    int64_t bytes = 0;
    struct { int64_t columns, depth, format; int64_t* bytes; } size{columns, depth, format, &bytes};
    quire_packed_size(&size);
    std::vector<uint8_t> packed(static_cast<size_t>(bytes));
    struct {
      const void *stored, *scales;
      void* packed;
      int64_t columns, depth, format;
      int threads;
    } pack{stored.data(), scales.data(), packed.data(), columns, depth, format, 1};
    quire_pack_quantized(&pack);
    struct { const void* packed; int64_t columns, format; } part{packed.data(), columns, format};
    for (int64_t count : {int64_t(1), int64_t(2), rows}) {
      std::vector<float> out(size_t(count * columns));
      struct {
        const void* x;
        int64_t x_stride;
        const void* parts;
        int64_t num_parts;
        const void* bias;
        void* out;
        int64_t out_stride, rows, depth;
        int threads, use_amx;
      } linear{x.data(), depth, &part, 1, scales.data(), out.data(), columns, count, depth, 1, 0};
      quire_linear_quantized_float32(&linear);
      print(names[format], out);
    }
    std::vector<int64_t> ids = {40, 0, 17};
    std::vector<float> out(size_t(3 * depth));
    struct {
      const void *packed, *ids;
      void* out;
      int64_t rows, depth, format;
      int threads;
    } unpack{packed.data(), ids.data(), out.data(), 3, depth, format, 1};
    quire_unpack_quantized(&unpack);
    print("rows", out);
  }
  std::vector<float> dense = numbers(size_t(columns * depth)), packed(dense.size()), out(size_t(rows * columns));
  struct { const void* weight; void* packed; int64_t columns, depth; int threads; } pack{
      dense.data(), packed.data(), columns, depth, 1};
  quire_pack_float32(&pack);
  struct {
    const void* x;
    int64_t x_stride;
    const void *weight, *bias;
    void* out;
    int64_t out_stride, rows, columns, depth;
    int threads;
  } linear{x.data(), depth, packed.data(), nullptr, out.data(), columns, rows, columns, depth, 1};
  quire_linear_float32(&linear);
  print("linear", out);
  out.assign(size_t(rows * depth), 0);
  for (int64_t size : {depth, int64_t(72), int64_t(30)}) {
    struct {
      const void* x;
      int64_t stride, inner;
      const void* weight;
      void* out;
      int64_t rows, size;
      float eps, offset;
      int threads;
    } norm{x.data(), depth, 1, dense.data(), out.data(), rows, size, 1e-5f, 0.0f, 1};
    quire_rms_norm_float32(&norm);
    print("rms_norm", out);
    norm.offset = 1.0f;
    quire_rms_norm_float32(&norm);
    print("rms_norm with an offset", out);
    struct { const void *x, *weight, *bias; void* out; int64_t rows, size; float eps; int threads; } layer_norm{
        x.data(), dense.data(), dense.data() + size, out.data(), rows, size, 1e-5f, 1};
    quire_layer_norm_float32(&layer_norm);
    print("layer_norm", out);
  }
  struct { const void *x, *other; void* out; int64_t rows, size; float scale; int threads; } scale_add{
      x.data(), dense.data(), out.data(), rows, depth, 0.22f, 1};
  quire_scale_add_float32(&scale_add);
  print("scale_add", out);
  struct { void* x; int64_t stride, rows, size; float cap; int threads; } soft_cap{out.data(), depth, rows, 72, 0.3f, 1};
  quire_soft_cap_float32(&soft_cap);
  print("soft_cap", out);
  struct { void* x; int64_t stride, rows, size; float limit; int threads; } clamp{out.data(), depth, rows, 72, 0.1f, 1};
  quire_clamp_float32(&clamp);
  print("clamp", out);
  for (int64_t activation : {0, 1, 2})
    for (int64_t gated : {0, 1}) {
      struct {
        const void* x;
        int64_t stride;
        void* out;
        int64_t rows, size, activation, gated;
        int threads;
      } activate{x.data(), depth, out.data(), rows, depth / 2, activation, gated, 1};
      quire_activate_float32(&activate);
      print("activate", out);
    }
  const int64_t heads = 12, head_dim = 64;
  std::vector<int64_t> positions(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; ++i) positions[size_t(i)] = i;
  struct {
    const void* x;
    int64_t stride;
    const void *positions, *cos_sin;
    void* out;
    int64_t rows, heads, head_dim;
    int threads;
  } rope{x.data(), depth, positions.data(), dense.data(), out.data(), rows, heads, head_dim, 1};
  quire_rope_float32(&rope);
  print("rope", out);
  struct { const void* x; int64_t x_stride; const void* other; int64_t other_stride; void* out; int64_t rows, size; int threads; }
      multiply{x.data(), depth, dense.data(), depth, out.data(), rows, 70, 1};
  quire_multiply_float32(&multiply);
  print("multiply", out);
  struct {
    const void* gate;
    int64_t gate_stride, gate_size;
    const void* x;
    int64_t x_stride;
    void* out;
    int64_t rows, size;
    int threads;
  } sigmoid_mul{dense.data(), depth, 70, x.data(), depth, out.data(), rows, 70, 1};
  quire_sigmoid_mul_float32(&sigmoid_mul);
  print("sigmoid_mul", out);
  for (int64_t gate_first : {0, 1, 2}) {  // 2: without SiLU
    struct {
      const void* x;
      int64_t x_stride;
      const void* gate;
      int64_t gate_stride;
      const void* weight;
      int64_t weight_size;
      void* out;
      int64_t rows, size, group_size, has_norm, gate_first, sigmoid_only;
      float eps;
      int threads;
    } gated_norm{x.data(), depth, dense.data(), depth, scales.data(), 20, out.data(), rows, 60, 20, 1, gate_first == 1, gate_first == 2, 1e-5f, 1};
    quire_gated_norm_float32(&gated_norm);
    print("gated_norm", out);
  }
  recurrences();
  adapters<float>(quire_add_low_rank_float32, "adapters");
  adapters<uint16_t>(quire_add_low_rank_bfloat16, "adapters in bfloat16");
  // One sequence of 700 tokens, of which the last 13 are new, over 44 blocks of 16.
  const int64_t blocks = 44, kv_heads = 4;
  std::vector<float> keys = numbers(size_t(blocks * kv_heads * 16 * head_dim)), values = numbers(keys.size());
  std::vector<int32_t> starts = {0, int32_t(rows)}, lengths = {700}, table, tables = {0};
  for (int64_t i = 0; i < blocks; ++i) table.push_back(int32_t(i * 7 % blocks));
  for (int64_t by_dimension : {0, 1}) {
    const int64_t window = by_dimension ? 0 : 100;
    struct {
      const void* query;
      int64_t query_stride;
      const void *keys, *values, *key_scales, *value_scales, *query_start, *context_lens, *block_tables, *table_rows;
      void* out;
      int64_t num_sequences, max_blocks, num_heads, num_kv_heads, head_dim, value_dim, block_size, block_stride;
      int64_t scale_stride, window, chunk, keys_by_dimension;
      const void *sinks, *slopes;
      float scale, cap, value_scale;
      int threads;
    } attention{x.data(), depth, keys.data(), values.data(), nullptr, nullptr, starts.data(), lengths.data(),
                table.data(), tables.data(), out.data(), 1, blocks, heads, kv_heads, head_dim, head_dim, 16,
                kv_heads * 16 * head_dim, kv_heads * 16, window, 0, by_dimension,
                nullptr, nullptr, 0.18f, 0, 1, 1};
    quire_attention_float32(&attention);
    print("attention", out);
    attention.sinks = dense.data(), attention.cap = 2.0f;
    quire_attention_float32(&attention);
    print("attention with sinks and a cap", out);
    attention.sinks = nullptr, attention.cap = 0.0f;
    attention.slopes = dense.data();
    quire_attention_float32(&attention);
    print("attention with slopes", out);
    attention.slopes = nullptr;
    std::vector<int8_t> bytes(2 * keys.size());
    for (int8_t& byte : bytes) byte = int8_t(int(next() % 255) - 127);
    std::vector<float> scales = numbers(size_t(2 * blocks * kv_heads * 16));
    attention.keys = bytes.data(), attention.values = bytes.data() + keys.size();
    attention.key_scales = scales.data(), attention.value_scales = scales.data() + blocks * kv_heads * 16;
    quire_attention_int8_float32(&attention);
    print("attention over an int8 cache", out);
    for (int8_t& byte : bytes) byte &= ~1;  // no NaN among FP8 numbers
    attention.value_scale = 0.7f;
    quire_attention_fp8_float32(&attention);
    print("attention over an FP8 cache", out);
  }
}
