// Decoded tokens and drafts. A warp has V columns a lane of one value head and reads each number of its state once.
#pragma once

constexpr int FEW_THREADS = 128;
constexpr int QUERIES_AT_ONCE = 8;

// Of a part of a run that lies in one chunk and begins in this row: norms, scores with the chunk's keys, decays.
__device__ inline void few_scores_of(const Call& call, int64 row, float* shared) {
  const int key_head = blockIdx.y, thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
  const int table = call.tables[row], position = call.positions[row];
  if (table < 0) return;
  if (position % CHUNK != 0 && in_step(call, row - 1, table, position - 1)) return;
  const int count = rows_in_chunk(call, row, table, position);
  if (count > call.limit) return;
  keep_last_inputs(call, row, table, position, count, FEW_THREADS);
  if (key_head == KEY_HEADS) return sum_decays(call, row, table, position, count, FEW_THREADS);
  const int begin = position / CHUNK * CHUNK, known = position - begin;
  float* const keys = shared;
  float* const queries = shared + KEYS_SIZE;
  for (int j = warp; j < known; j += FEW_THREADS / LANES) {
    const float* record = key_record(call, block_of(call, table, begin + j), key_head, begin + j);
    copy_numbers(keys + row_place(j, ROW), record, KEY_DIM, lane, LANES);
  }
  end_copies();
  for (int first = 0; first < count; first += QUERIES_AT_ONCE) {
    const int size = least(QUERIES_AT_ONCE, count - first);
    // a token's query and its key are two tasks
    for (int task = warp; task < 2 * size; task += FEW_THREADS / LANES) {
      const int t = first + task / 2, at = position + t;
      const Number* source = call.mixed + (row + t) * call.mixed_stride + key_head * KEY_DIM;
      float x[PIECES][4];
      if (task % 2 == 0) {
        read_normed(source, call.query_scale, x);
        write_vector<true>(query_of(call, row + t, key_head), x);
        write_vector<false>(queries + task / 2 * ROW, x);
      } else {
        read_normed(source + KEY_HEADS * KEY_DIM, 1.0f, x);
        write_vector<true>(key_record(call, block_of(call, table, at), key_head, at), x);
        write_vector<false>(keys + row_place(known + t, ROW), x);
      }
    }
    if (first == 0) wait_for_copies<0>();
    __syncthreads();
    const int j = thread % CHUNK, which = thread / CHUNK;  // of a query, or of a key, with key j
    if (DELTA || which == 0) {
      for (int t = 0; t < size; ++t) {
        const int i = known + first + t;
        if (j > i - which) continue;
        const float* own = which == 0 ? queries + t * ROW : keys + row_place(i, ROW);
        const float* other = keys + row_place(j, ROW);
        float score = 0.0f;
#pragma unroll 8
        for (int k = 0; k < KEY_DIM / 4; ++k) {
          const float4 a = read4(own + 4 * k), b = read4(other + 4 * k);
          score = __fmaf_rn(a.x, b.x, score);
          score = __fmaf_rn(a.y, b.y, score);
          score = __fmaf_rn(a.z, b.z, score);
          score = __fmaf_rn(a.w, b.w, score);
        }
        for (int k = KEY_DIM / 4 * 4; k < KEY_DIM; ++k) score = __fmaf_rn(own[k], other[k], score);
        scores_of(call, row + first + t, key_head, which)[j] = score;
      }
    }
    __syncthreads();
  }
}

// The parts of up to `limit` tokens of a sequence's rows: only the first and the last one may be that short. A block has
// a key head, the last one the decays.
extern "C" __global__ void __launch_bounds__(FEW_THREADS) few_scores(const Call call) {
  begin_kernel();
  SHARED_MEMORY(shared);
  if (call.single) return few_scores_of(call, blockIdx.x, shared);
  const int64 row = call.starts[blockIdx.x], last = call.starts[blockIdx.x + 1] - 1;
  if (last < row) return;
  few_scores_of(call, row, shared);
  const int64 lead = last - call.positions[last] % CHUNK;
  if (lead > row) few_scores_of(call, lead, shared);
}

// Numbers that a lane asks for at once: of so many rows, of which the next ones are on their way while it computes.
template <int V, int TOKENS>
constexpr int AHEAD = V == 4 ? (TOKENS == 1 ? 8 : 4) : (V == 2 ? 16 : 32) / (TOKENS == 1 ? 1 : 2);

// What all lanes need of the tokens that are computed at once.
template <int TOKENS>
struct Shared {
  float vectors[KEY_DIM][TOKENS][2];  // the tokens' keys and queries
  float weights[CHUNK][TOKENS][2];    // scores that have faded: of keys, of queries
};

// And of the chunk.
struct ChunkShared {
  float decays[CHUNK];
  float fades[CHUNK];  // from each token to the chunk's end
  int64 blocks[BLOCKS];
};

template <int V, int TOKENS>
struct Sums {
  float said[TOKENS][V];
  float asked[TOKENS][V];

  // A row of the state, or a change, times the tokens' numbers.
  __device__ void add(const Columns<V>& row, const float (&factors)[TOKENS][2]) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
#if DELTA
        said[t][v] = __fmaf_rn(factors[t][0], row.at[v], said[t][v]);
#endif
        asked[t][v] = __fmaf_rn(factors[t][1], row.at[v], asked[t][v]);
      }
    }
  }
};

// What the state at `state` says, in order of its rows.
template <int V, int TOKENS>
__device__ inline void ask_state(Sums<V, TOKENS>& sums, const float* state, bool inside, const Shared<TOKENS>& shared) {
  constexpr int SIZE = AHEAD<V, TOKENS>;
  Columns<V> next[SIZE], now[SIZE];
#pragma unroll
  for (int e = 0; e < SIZE; ++e) next[e] = read_columns<V>(state + e * VALUE_DIM, inside && e < KEY_DIM);
#pragma unroll 2
  for (int k = 0; k < KEY_DIM; k += SIZE) {
#pragma unroll
    for (int e = 0; e < SIZE; ++e) now[e] = next[e];
#pragma unroll
    for (int e = 0; e < SIZE; ++e)
      next[e] = read_columns<V>(state + (k + SIZE + e) * VALUE_DIM, inside && k + SIZE + e < KEY_DIM);
#pragma unroll
    for (int e = 0; e < SIZE; ++e)
      if (KEY_DIM % SIZE == 0 || k + e < KEY_DIM) sums.add(now[e], shared.vectors[k + e]);
  }
}

// The changes of the chunk's first `count` tokens; `records` is where this lane's columns begin in block 0.
template <int V, int TOKENS>
__device__ inline void ask_changes(
    Sums<V, TOKENS>& sums, const Call& call, int head, int column, int count, bool inside,
    const ChunkShared& chunk, const Shared<TOKENS>& shared) {
  constexpr int SIZE = 8;
  Columns<V> next[SIZE], now[SIZE];
  auto ask = [&](int first) {
    if (first >= count) return;
    const float* record = change_record(call, chunk.blocks[first / BLOCK_SIZE], head, first) + column;
#pragma unroll
    for (int e = 0; e < SIZE; ++e) next[e] = read_columns<V>(record + e * VALUE_DIM, inside && first + e < count);
  };
  ask(0);
#pragma unroll 2
  for (int first = 0; first < count; first += SIZE) {
#pragma unroll
    for (int e = 0; e < SIZE; ++e) now[e] = next[e];
    ask(first + SIZE);
#pragma unroll
    for (int e = 0; e < SIZE; ++e)
      if (first + e < count) sums.add(now[e], shared.weights[first + e]);
  }
}

// The next `count` tokens of a run, at most TOKENS, from the chunk's token `first` on.
template <int V, int TOKENS>
__device__ inline void compute_few(
    const Call& call, int64 row, int head, int column, const float* state, bool has_state, int first,
    int count, ChunkShared& chunk, Shared<TOKENS>& shared) {
  const int lane = threadIdx.x, key_head = head / HEADS_OF_A_KEY;
  const bool inside = column < VALUE_DIM;
  __syncwarp();
  float now[TOKENS], betas[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    const int i = least(first + t, first + count - 1);  // those that are not there are like the last one
    const int64 source = row + (i - first);
    now[t] = *decay_record(call, chunk.blocks[i / BLOCK_SIZE], head, i);
    betas[t] = beta_of(call, beta_gate(call, source, head), head);
#if DELTA
    const float* key = key_record(call, chunk.blocks[i / BLOCK_SIZE], key_head, i);
#endif
    const float* query = query_of(call, source, key_head);
#pragma unroll
    for (int k = 0; k < KEY_DIM; k += LANES) {
      if (k + lane < KEY_DIM) {
#if DELTA
        shared.vectors[k + lane][t][0] = key[k + lane];
#endif
        shared.vectors[k + lane][t][1] = query[k + lane];
      }
    }
#pragma unroll
    for (int j = lane; j < CHUNK; j += LANES) {
      if (j > i) continue;
      const float then = j < first ? chunk.decays[j] : *decay_record(call, chunk.blocks[j / BLOCK_SIZE], head, j);
      const float fade = expf(__fsub_rn(now[t], then));
#if DELTA
      if (j < i) shared.weights[j][t][0] = __fmul_rn(scores_of(call, source, key_head, 1)[j], fade);
#endif
      shared.weights[j][t][1] = __fmul_rn(scores_of(call, source, key_head, 0)[j], fade);
      if (j >= first) chunk.decays[j] = then;
    }
  }
  __syncwarp();
  Sums<V, TOKENS> sums = {};
  if (has_state) ask_state(sums, state + column, inside, shared);
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    const float since = expf(now[t]);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      sums.said[t][v] = __fmul_rn(sums.said[t][v], since);
      sums.asked[t][v] = __fmul_rn(sums.asked[t][v], since);
    }
  }
  ask_changes(sums, call, head, column, first, inside, chunk, shared);
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    if (t >= count) break;
    const int i = first + t;
    const Number* source = value_of(call, row + t, head) + column;
    Columns<V> value, change;
#pragma unroll
    for (int v = 0; v < V; ++v) value.at[v] = inside ? to_float(source[v]) : 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
#if DELTA
      change.at[v] = __fmul_rn(betas[t], __fsub_rn(value.at[v], sums.said[t][v]));
#else
      change.at[v] = __fmul_rn(betas[t], value.at[v]);
#endif
    }
    write_columns(change_record(call, chunk.blocks[i / BLOCK_SIZE], head, i) + column, change, inside);
#pragma unroll
    for (int later = t; later < TOKENS; ++later) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
#if DELTA
        if (later > t) sums.said[later][v] = __fmaf_rn(shared.weights[i][later][0], change.at[v], sums.said[later][v]);
#endif
        sums.asked[later][v] = __fmaf_rn(shared.weights[i][later][1], change.at[v], sums.asked[later][v]);
      }
    }
    Number* out = call.out + (row + t) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + column;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float result = sums.asked[t][v];
#if SKIP
      result = __fmaf_rn(value.at[v], call.skip[head], result);
#endif
      if (inside) out[v] = from_float(result);
    }
  }
}

// The state at the chunk's end, whose records are all there.
template <int V>
__device__ inline void carry_on(
    const Call& call, int head, int column, const float* state, bool has_state, float* next_state, ChunkShared& chunk) {
  constexpr int SIZE = V == 4 ? 8 : 16, EVERY = 4;
  const int lane = threadIdx.x, key_head = head / HEADS_OF_A_KEY;
  const bool inside = column < VALUE_DIM;
  const float last = chunk.decays[CHUNK - 1], left = expf(last);
  for (int j = lane; j < CHUNK; j += LANES) chunk.fades[j] = expf(__fsub_rn(last, chunk.decays[j]));
  __syncwarp();
  for (int k = 0; k < KEY_DIM; k += SIZE) {
    Columns<V> total[SIZE];
#pragma unroll
    for (int e = 0; e < SIZE; ++e) {
      total[e] = read_columns<V>(state + (k + e) * VALUE_DIM + column, has_state && inside && k + e < KEY_DIM);
#pragma unroll
      for (int v = 0; v < V; ++v) total[e].at[v] = __fmul_rn(total[e].at[v], left);
    }
    for (int first = 0; first < CHUNK; first += EVERY) {
      const int64 block = chunk.blocks[first / BLOCK_SIZE];
      Columns<V> change[EVERY];
      float key[EVERY][SIZE];
#pragma unroll
      for (int j = 0; j < EVERY; ++j) {
        change[j] = read_columns<V>(change_record(call, block, head, first + j) + column, inside);
        const float* source = key_record(call, block, key_head, first + j) + k;
#pragma unroll
        for (int e = 0; e < SIZE; e += 4) {
#if ALIGNED
          const float4 some = k + e < KEY_DIM ? read4(source + e) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          key[j][e] = some.x, key[j][e + 1] = some.y, key[j][e + 2] = some.z, key[j][e + 3] = some.w;
#else
#pragma unroll
          for (int x = e; x < e + 4; ++x) key[j][x] = k + x < KEY_DIM ? source[x] : 0.0f;
#endif
        }
      }
#pragma unroll
      for (int j = 0; j < EVERY; ++j) {
        const float fade = chunk.fades[first + j];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const float faded = __fmul_rn(change[j].at[v], fade);
#pragma unroll
          for (int e = 0; e < SIZE; ++e) total[e].at[v] = __fmaf_rn(key[j][e], faded, total[e].at[v]);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < SIZE; ++e) write_columns(next_state + (k + e) * VALUE_DIM + column, total[e], inside && k + e < KEY_DIM);
  }
}

// The run that begins with a sequence of the step: of 32 V columns of a value head.
template <int V>
__device__ inline void few_tokens(const Call& call) {
  constexpr int PARTS = (VALUE_DIM + LANES * V - 1) / (LANES * V), TOKENS = 4;
  __shared__ ChunkShared chunk;
  __shared__ union {
    Shared<1> one;
    Shared<TOKENS> some;
  } shared;
  const int lane = threadIdx.x, head = blockIdx.y / PARTS, column = (blockIdx.y % PARTS * LANES + lane) * V;
  int64 row = blockIdx.x;
  if (!call.single) {
    row = call.starts[blockIdx.x];
    if (call.starts[blockIdx.x + 1] <= row) return;
  }
  const int table = call.tables[row];
  int position = call.positions[row];
  if (table < 0 || in_step(call, row - 1, table, position - 1)) return;
  if (!call.single && in_step(call, row + call.limit, table, position + static_cast<int>(call.limit))) return;
  while (true) {
    const int begin = position / CHUNK * CHUNK, count = rows_in_chunk(call, row, table, position);
    const bool has_state = begin > 0;
    const float* state = carried<const float>(call, call.state_places, head, table, begin);
    const int known = position - begin;
    __syncwarp();
    for (int i = lane; i < BLOCKS; i += LANES)
      if (i * BLOCK_SIZE < known + count) chunk.blocks[i] = block_of(call, table, begin + i * BLOCK_SIZE);
    __syncwarp();
    for (int j = lane; j < known; j += LANES) chunk.decays[j] = *decay_record(call, chunk.blocks[j / BLOCK_SIZE], head, j);
    if (count == 1) {
      compute_few<V, 1>(call, row, head, column, state, has_state, known, 1, chunk, shared.one);
    } else {
      for (int t = 0; t < count; t += TOKENS)
        compute_few<V, TOKENS>(
            call, row + t, head, column, state, has_state, known + t, least(TOKENS, count - t), chunk, shared.some);
    }
    if (known + count < CHUNK) return;
    __syncwarp();
    float* next_state = carried<float>(call, call.state_places, head, table, begin + CHUNK);
    carry_on<V>(call, head, column, state, has_state, next_state, chunk);
    row += count;
    position += count;
    if (!in_step(call, row, table, position)) return;
  }
}

extern "C" __global__ void __launch_bounds__(LANES, 16) few_tokens_1(const Call call) {
  begin_kernel();
  few_tokens<1>(call);
}

#if ALIGNED
extern "C" __global__ void __launch_bounds__(LANES, 16) few_tokens_2(const Call call) {
  begin_kernel();
  few_tokens<2>(call);
}

extern "C" __global__ void __launch_bounds__(LANES, 16) few_tokens_4(const Call call) {
  begin_kernel();
  few_tokens<4>(call);
}
#endif
