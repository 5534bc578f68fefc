// What the kernels of layers with a state have in common. The sums, whoever computes them:
//
//   norm of a query or key    lane l of a warp has the channels 4l..4l+3, and those 128 further, in one chain; then lanes
//                             that differ in bit 4, 3, 2, 1, 0 are added
//   score_ij                  a chain over the channels, in order
//   G_i                       a chain over the chunk's tokens, in order
//   said_i[v], asked_i[v]     a chain over the state's rows S[k][v] k_i[k] in order, from zero; times e^{G_i}; then, on the
//                             same chain, (score_ij e^{G_i-G_j}) change_j[v] over j in order
//   S_next[k][v]              S[k][v] e^{G_63}, then a chain k_j[k] (change_j[v] e^{G_63-G_j}) over j in order
//
// A chain is made of fused multiply-adds. As no number depends on where or beside what others it is computed, kernels for
// decoded tokens and for prompts divide the work differently and give the same bits.
//
// The compiler is given: KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, BLOCK_SIZE, TAPS, DELTA, SKIP, NUMBER (0: float32,
// 1: float16, 2: bfloat16), ALIGNED (all vectors begin at multiples of 16 bytes), PDL.
#pragma once

using int64 = long long;
constexpr int CHUNK = 64;
constexpr int LANES = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int BLOCKS = CHUNK / BLOCK_SIZE;
constexpr int CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM;
constexpr int HEADS_OF_A_KEY = VALUE_HEADS / KEY_HEADS;
constexpr float NORM_EPSILON = 1e-6f;

#if NUMBER == 0
using Number = float;
__device__ inline float to_float(Number x) { return x; }
__device__ inline Number from_float(float x) { return x; }
#elif NUMBER == 1
using Number = half_bits;
__device__ inline float to_float(Number x) { return float_of_half(x); }
__device__ inline Number from_float(float x) { return half_of_float(x); }
__device__ inline unsigned two_from_floats(float x, float y) {
  return static_cast<unsigned>(from_float(x)) | static_cast<unsigned>(from_float(y)) << 16;
}
#else
using Number = unsigned short;
__device__ inline float to_float(Number x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }
__device__ inline Number from_float(float x) { return static_cast<Number>(bfloats_of_floats(x, 0.0f)); }
__device__ inline unsigned two_from_floats(float x, float y) { return bfloats_of_floats(x, y); }
#endif

struct Call {  // in the order of `_Call` in recurrent.py
  const Number* mixed;
  const Number* gates;
  const float* log_rate;
  const float* time_bias;
  const float* skip;
  Number* out;
  float* queries;
  float* scores;
  float* keys;
  float* changes;
  float* decays;
  const Number* inputs;
  const int64* tail_places;
  const int64* state_places;
  const int* starts;
  const int* tables;
  const int* positions;
  const int* block_tables;
  const int* state_tables;
  int64 rows;
  int64 single;  // each row is a sequence of its own for the host
  int64 limit;   // kernels for few tokens compute runs, or their parts in a chunk, of up to so many; others the longer ones
  int64 mixed_stride;
  int64 gates_stride;
  int64 table_stride;
  int64 key_stride;
  int64 change_stride;
  int64 decay_stride;
  int64 input_stride;
  int64 state_stride;
  int64 state_width;
  int64 least_columns;  // of a program for prompts, and at most
  int64 most_columns;
  int64 multiprocessors;
  float least_step;
  float largest_step;
  float beta_scale;
  float query_scale;
};

__device__ inline int least(int a, int b) { return a < b ? a : b; }
__device__ inline int most(int a, int b) { return a > b ? a : b; }

// Whether row `row` of the step is the token of this request at this position.
__device__ inline bool in_step(const Call& call, int64 row, int table, int position) {
  if (row < 0 || row >= call.rows) return false;
  const int its_table = call.tables[row], its_position = call.positions[row];  // both are asked for at once
  return its_table == table && its_position == position;
}

__device__ inline int64 block_of(const Call& call, int table, int position) {
  return call.block_tables[table * call.table_stride + position / BLOCK_SIZE];
}

__device__ inline float* key_record(const Call& call, int64 block, int key_head, int position) {
  return call.keys + block * call.key_stride + (key_head * BLOCK_SIZE + position % BLOCK_SIZE) * KEY_DIM;
}

__device__ inline float* change_record(const Call& call, int64 block, int head, int position) {
  return call.changes + block * call.change_stride + (head * BLOCK_SIZE + position % BLOCK_SIZE) * VALUE_DIM;
}

__device__ inline float* decay_record(const Call& call, int64 block, int head, int position) {
  return call.decays + block * call.decay_stride + head * BLOCK_SIZE + position % BLOCK_SIZE;
}

__device__ inline float* query_of(const Call& call, int64 row, int key_head) {
  return call.queries + (row * KEY_HEADS + key_head) * KEY_DIM;
}

// Of a row, with the chunk's keys: [0] of its query, [1] of its key.
__device__ inline float* scores_of(const Call& call, int64 row, int key_head, int which) {
  return call.scores + ((row * KEY_HEADS + key_head) * 2 + which) * CHUNK;
}

// One head of what is carried to the chunk that begins there.
template <typename T>
__device__ inline T* carried(const Call& call, const int64* places, int head, int table, int begin) {
  const int64 which = places[3 * head];
  const int64 block =
      call.state_tables[begin / CHUNK % 2 * call.state_stride + table * call.state_width + which];
  return in_global_memory(reinterpret_cast<T*>(places[3 * head + 1] + block * places[3 * head + 2]));
}

// log(1 + e^x) as max(x, 0) + log(1 + y) with y = e^-|x|; see recurrent.cpp.
__device__ inline float softplus(float x) {
  const float y = expf(-fabsf(x));
  const float s = y / (2.0f + y);
  const float square = s * s;
  float series = __fmaf_rn(square, 1.0f / 15.0f, 1.0f / 13.0f);
  series = __fmaf_rn(series, square, 1.0f / 11.0f);
  series = __fmaf_rn(series, square, 1.0f / 9.0f);
  series = __fmaf_rn(series, square, 1.0f / 7.0f);
  series = __fmaf_rn(series, square, 1.0f / 5.0f);
  series = __fmaf_rn(series, square, 1.0f / 3.0f);
  series = __fmaf_rn(series, square, 1.0f);
  return __fadd_rn(x > 0.0f ? x : 0.0f, __fmul_rn(__fmul_rn(2.0f, s), series));
}

__device__ inline float time_step(const Call& call, Number gate, int head) {
  float step = softplus(__fadd_rn(to_float(gate), call.time_bias[head]));
#if !DELTA
  step = step < call.least_step ? call.least_step : step;
  step = step > call.largest_step ? call.largest_step : step;
#endif
  return step;
}

__device__ inline Number time_gate(const Call& call, int64 row, int head) { return call.gates[row * call.gates_stride + head]; }

// The gate of what a change is multiplied with.
__device__ inline Number beta_gate(const Call& call, int64 row, int head) {
  return time_gate(call, row, (DELTA ? VALUE_HEADS : 0) + head);
}

__device__ inline float beta_of(const Call& call, Number gate, int head) {
#if DELTA
  return call.beta_scale / __fadd_rn(1.0f, expf(-to_float(gate)));
#else
  return time_step(call, gate, head);
#endif
}

__device__ inline const Number* value_of(const Call& call, int64 row, int head) {
  return call.mixed + row * call.mixed_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM;
}

// Of how many rows, `row` being the first, the tokens follow each other within this chunk, at most 64. By a whole warp.
__device__ inline int rows_in_chunk(const Call& call, int64 row, int table, int position) {
  const int left = CHUNK - position % CHUNK;
  int count = 0;
  for (int first = 0; first < left; first += LANES) {
    const int ahead = first + threadIdx.x % LANES;
    const bool follows = ahead < left && in_step(call, row + ahead, table, position + ahead);
    const unsigned others = ~__ballot_sync(ALL_LANES, follows);
    if (others != 0) return count + __ffs(others) - 1;
    count += LANES;
  }
  return count;
}

__device__ inline float4 read4(const float* from) { return *reinterpret_cast<const float4*>(from); }

__device__ inline float element(const float4& x, int e) { return e == 0 ? x.x : e == 1 ? x.y : e == 2 ? x.z : x.w; }

// 4 neighbouring numbers as they were read: to take them apart would be to wait for them.
struct FourNumbers {
#if ALIGNED && NUMBER != 0
  unsigned pairs[2];
  __device__ inline Number operator[](int v) const { return static_cast<Number>(pairs[v / 2] >> (v % 2 * 16)); }
#else
  Number each[4];
  __device__ inline Number operator[](int v) const { return each[v]; }
#endif
};

// Of which `inside` are there.
__device__ inline FourNumbers read_four(const Number* from, int inside) {
#if ALIGNED && NUMBER != 0
  const float2 found = inside > 0 ? *reinterpret_cast<const float2*>(from) : make_float2(0.0f, 0.0f);
  return {{__float_as_uint(found.x), __float_as_uint(found.y)}};
#elif ALIGNED
  const float4 found = inside > 0 ? read4(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  return {{found.x, found.y, found.z, found.w}};
#else
  FourNumbers found;
#pragma unroll
  for (int v = 0; v < 4; ++v) found.each[v] = v < inside ? from[v] : Number(0);
  return found;
#endif
}

__device__ inline void read_numbers(const Number* from, int inside, Number (&to)[4]) {
  const FourNumbers found = read_four(from, inside);
#pragma unroll
  for (int v = 0; v < 4; ++v) to[v] = found[v];
}

// A warp's query or key: the lane's channels of a row.
constexpr int PIECES = (KEY_DIM + 4 * LANES - 1) / (4 * LANES);

__device__ inline void read_vector(const Number* source, Number (&x)[PIECES][4]) {
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) {
    const int k = (piece * LANES + threadIdx.x % LANES) * 4;
    read_numbers(source + k, KEY_DIM - k, x[piece]);
  }
}

// Normed if DELTA, times `scale`.
__device__ inline void normed(const Number (&given)[PIECES][4], float scale, float (&x)[PIECES][4]) {
  float squares = 0.0f;
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[piece][e] = to_float(given[piece][e]);
  }
#if DELTA
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
    for (int e = 0; e < 4; ++e) squares = __fmaf_rn(x[piece][e], x[piece][e], squares);
  }
  for (int apart = LANES / 2; apart > 0; apart /= 2)
    squares = __fadd_rn(squares, __shfl_xor_sync(ALL_LANES, squares, apart));
  const float factor = __fmul_rn(inverse_root(__fadd_rn(squares, NORM_EPSILON)), scale);
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[piece][e] = __fmul_rn(x[piece][e], factor);
  }
#endif
}

__device__ inline void read_normed(const Number* source, float scale, float (&x)[PIECES][4]) {
  Number given[PIECES][4];
  read_vector(source, given);
  normed(given, scale, x);
}

// To shared memory, or to global.
template <bool GLOBAL>
__device__ inline void write_vector(float* target, const float (&x)[PIECES][4]) {
  const int lane = threadIdx.x % LANES;
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) {
    const int k = (piece * LANES + lane) * 4;
#if ALIGNED
    if (k >= KEY_DIM) continue;
    if (GLOBAL)
      write4_global(target + k, x[piece][0], x[piece][1], x[piece][2], x[piece][3]);
    else
      *reinterpret_cast<float4*>(target + k) = make_float4(x[piece][0], x[piece][1], x[piece][2], x[piece][3]);
#else
    for (int e = 0; e < 4; ++e)
      if (k + e < KEY_DIM) target[k + e] = x[piece][e];
#endif
  }
}

// `count` numbers from global to shared memory, which is aligned; by copies that the caller waits for. Threads
// `first`, `first` + `step`... of those that share it call it with their own index.
__device__ inline void copy_numbers(float* to, const float* from, int count, int index, int step) {
#if ALIGNED
  for (int i = 4 * index; i < count; i += 4 * step) copy16_async(to + i, from + i);
#else
  for (int i = index; i < count; i += step) to[i] = from[i];
#endif
}

// Tokens' vectors in shared memory: rows of `size` numbers, so far apart that what a warp reads at once lies in different
// banks: of neighbouring tokens, and of tokens that are 8 apart.
__host__ __device__ constexpr int padded(int size) { return (size + 3) / 4 * 4 + 4; }
constexpr int ROW = padded(KEY_DIM);
constexpr int KEYS_SIZE = CHUNK * ROW + CHUNK / 8 * 16;
__device__ inline int row_place(int token, int row) { return token * row + token / 8 * 16; }

template <int V>
struct Columns {
  float at[V];
};

// V numbers of a row of the state or of a change; zeros where there are none.
template <int V>
__device__ inline Columns<V> read_columns(const float* from, bool exists) {
  Columns<V> result;
  if constexpr (V == 4) {
    const float4 found = exists ? read4(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    result.at[0] = found.x, result.at[1] = found.y, result.at[2] = found.z, result.at[3] = found.w;
  } else if constexpr (V == 2 && ALIGNED) {
    const float2 found = exists ? *reinterpret_cast<const float2*>(from) : make_float2(0.0f, 0.0f);
    result.at[0] = found.x, result.at[1] = found.y;
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) result.at[v] = exists ? from[v] : 0.0f;
  }
  return result;
}

template <int V>
__device__ inline void write_columns(float* to, const Columns<V>& x, bool exists) {
  if (!exists) return;
  if constexpr (V == 4) {
    *reinterpret_cast<float4*>(to) = make_float4(x.at[0], x.at[1], x.at[2], x.at[3]);
  } else if constexpr (V == 2 && ALIGNED) {
    *reinterpret_cast<float2*>(to) = make_float2(x.at[0], x.at[1]);
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) to[v] = x.at[v];
  }
}

// The sums of log-decays of `count` tokens from `row` on, of the value heads that this block's threads have.
__device__ inline void sum_decays(const Call& call, int64 row, int table, int position, int count, int threads) {
  const int begin = position / CHUNK * CHUNK;
  for (int head = threadIdx.x; head < VALUE_HEADS; head += threads) {
    const float rate = -expf(call.log_rate[head]);
    float total = 0.0f;
    if (position > begin) total = *decay_record(call, block_of(call, table, position - 1), head, position - 1);
    for (int i = 0; i < count; i += 8) {
      float steps[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const Number gate = time_gate(call, row + least(i + e, count - 1), head);
        steps[e] = time_step(call, gate, head);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (i + e < count) {
          total = __fmaf_rn(rate, steps[e], total);
          *decay_record(call, block_of(call, table, position + i + e), head, position + i + e) = total;
        }
      }
    }
  }
}

// A share of the convolution's last inputs before the next chunk, if this one ends with `count` tokens from `row` on; of
// the last two chunks that end in the run, as others would be replaced.
__device__ inline void keep_last_inputs(const Call& call, int64 row, int table, int position, int count, int threads) {
  const int end = position / CHUNK * CHUNK + CHUNK;
  if (position + count < end) return;
  if (in_step(call, row + (end - 1 - position) + 2 * CHUNK, table, end - 1 + 2 * CHUNK)) return;
  for (int tap = 0; tap < TAPS - 1; ++tap) {
    const int at = end - (TAPS - 1) + tap;
    const Number* source = call.inputs + block_of(call, table, at) * call.input_stride + at % BLOCK_SIZE * CHANNELS;
    Number* target = carried<Number>(call, call.tail_places, tap, table, end);
    for (int i = blockIdx.y * threads + threadIdx.x; i < CHANNELS; i += gridDim.y * threads) target[i] = source[i];
  }
}
