// Decoded tokens and drafts. A warp has V columns a lane of one value head and reads each number of its state once.
#pragma once

constexpr int FEW_THREADS = 128;
constexpr int QUERIES_AT_ONCE = 8;

// Kernels for few tokens read what earlier steps have left while the kernel before them still works. `few_scores` may,
// as the convolution lets it start only when all before it is done; it does the same for `few_tokens_ahead`, which so may
// read the convolution's results, too.
struct Beginning {
  bool is_over;
  __device__ void end() {
    if (is_over) return;
    wait_for_previous();
    let_next_start();
    is_over = true;
  }
};

// Of a part of a run that lies in one chunk and begins in this row: norms, scores with the chunk's keys, decays.
__device__ inline void few_scores_of(const Call& call, int64 row, float* shared, Beginning& beginning) {
  const int key_head = blockIdx.y, thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
  const int table = call.tables[row], position = call.positions[row];
  if (table < 0) return;
  if (position % CHUNK != 0 && in_step(call, row - 1, table, position - 1)) return;
  const int count = rows_in_chunk(call, row, table, position);
  if (count > call.limit) return;
  const int begin = position / CHUNK * CHUNK, known = position - begin;
  float* const keys = shared;
  float* const queries = shared + KEYS_SIZE;
  if (key_head < KEY_HEADS) {
#pragma unroll 4
    for (int j = warp; j < known; j += FEW_THREADS / LANES) {
      const float* record = key_record(call, block_of(call, table, begin + j), key_head, begin + j);
      copy_numbers(keys + row_place(j, ROW), record, KEY_DIM, lane, LANES);
    }
  }
  end_copies();
  beginning.end();
  keep_last_inputs(call, row, table, position, count, FEW_THREADS);
  if (key_head == KEY_HEADS) return sum_decays(call, row, table, position, count, FEW_THREADS);
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
  SHARED_MEMORY(shared);
  Beginning beginning = {false};
  if (call.single) {
    few_scores_of(call, blockIdx.x, shared, beginning);
  } else {
    const int64 row = call.starts[blockIdx.x], last = call.starts[blockIdx.x + 1] - 1;
    if (row <= last) {
      few_scores_of(call, row, shared, beginning);
      const int64 lead = last - call.positions[last] % CHUNK;
      if (lead > row) few_scores_of(call, lead, shared, beginning);
    }
  }
  beginning.end();
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

// What was copied to shared memory before: rows of a program's columns of the state, behind them those of changes.
template <int V>
constexpr int COPIED_ROW = LANES * V;
template <int V>
constexpr int COPIED_SIZE = (KEY_DIM + CHUNK) * COPIED_ROW<V>;

// `count` rows from `from` on, where the program's columns begin.
template <int V>
__device__ inline void copy_rows(float* to, const float* from, int count, int inside) {
  constexpr int PIECES_OF_A_ROW = COPIED_ROW<V> / 4;
#pragma unroll 8
  for (int i = threadIdx.x; i < count * PIECES_OF_A_ROW; i += LANES) {
    const int row = i / PIECES_OF_A_ROW, column = i % PIECES_OF_A_ROW * 4;
    if (column < inside) copy16_async(to + row * COPIED_ROW<V> + column, from + row * VALUE_DIM + column);
  }
}

template <int V, int TOKENS>
__device__ inline void ask_copied(
    Sums<V, TOKENS>& sums, const float* copied, int count, const float (*factors)[TOKENS][2]) {
#pragma unroll 8
  for (int k = 0; k < count; ++k)
    sums.add(read_columns<V>(copied + k * COPIED_ROW<V> + threadIdx.x * V, true), factors[k]);
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

// The next `count` tokens of a run, at most TOKENS, from the chunk's token `first` on. IS_AHEAD: where `is_copied`,
// the state and the changes of all tokens before `first` are in `copied`.
template <int V, int TOKENS, bool IS_AHEAD>
__device__ inline void compute_few(
    const Call& call, int64 row, int head, int column, const float* state, bool has_state, int first,
    int count, ChunkShared& chunk, Shared<TOKENS>& shared, const float* copied, bool is_copied) {
  const int lane = threadIdx.x, key_head = head / HEADS_OF_A_KEY;
  const bool inside = column < VALUE_DIM;
  __syncwarp();
  float now[TOKENS], betas[TOKENS];
  Number values[TOKENS][V];
  if constexpr (IS_AHEAD) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const Number* source = value_of(call, row + least(t, count - 1), head) + column;
#pragma unroll
      for (int v = 0; v < V; ++v) values[t][v] = inside ? source[v] : Number(0);
    }
  }
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    const int i = least(first + t, first + count - 1);  // those that are not there are like the last one
    const int64 source = row + (i - first);
    now[t] = *decay_record(call, chunk.blocks[i / BLOCK_SIZE], head, i);
    betas[t] = beta_of(call, beta_gate(call, source, head), head);
    // all is asked for before the first is used
    const float* key = key_record(call, chunk.blocks[i / BLOCK_SIZE], key_head, i);
    const float* query = query_of(call, source, key_head);
    constexpr int SHARE = (KEY_DIM + LANES - 1) / LANES;
    float keys[SHARE], queries[SHARE], thens[CHUNK / LANES], scores[CHUNK / LANES][2];
#pragma unroll
    for (int e = 0; e < SHARE; ++e) {
      const int k = e * LANES + lane;
      keys[e] = DELTA && k < KEY_DIM ? key[k] : 0.0f;
      queries[e] = k < KEY_DIM ? query[k] : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < CHUNK / LANES; ++e) {
      const int j = e * LANES + lane;
      scores[e][0] = DELTA && j < i ? scores_of(call, source, key_head, 1)[j] : 0.0f;
      scores[e][1] = j <= i ? scores_of(call, source, key_head, 0)[j] : 0.0f;
      thens[e] = j < first ? chunk.decays[j] : j <= i ? *decay_record(call, chunk.blocks[j / BLOCK_SIZE], head, j) : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < SHARE; ++e) {
      const int k = e * LANES + lane;
      if (k >= KEY_DIM) continue;
      shared.vectors[k][t][0] = keys[e];
      shared.vectors[k][t][1] = queries[e];
    }
#pragma unroll
    for (int e = 0; e < CHUNK / LANES; ++e) {
      const int j = e * LANES + lane;
      if (j > i) continue;
      const float fade = expf(__fsub_rn(now[t], thens[e]));
      if (DELTA && j < i) shared.weights[j][t][0] = __fmul_rn(scores[e][0], fade);
      shared.weights[j][t][1] = __fmul_rn(scores[e][1], fade);
      if (j >= first) chunk.decays[j] = thens[e];
    }
  }
  __syncwarp();
  Sums<V, TOKENS> sums = {};
  if (has_state) {
    if (IS_AHEAD && is_copied)
      ask_copied<V, TOKENS>(sums, copied, KEY_DIM, shared.vectors);
    else
      ask_state(sums, state + column, inside, shared);
  }
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    const float since = expf(now[t]);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      sums.said[t][v] = __fmul_rn(sums.said[t][v], since);
      sums.asked[t][v] = __fmul_rn(sums.asked[t][v], since);
    }
  }
  if (IS_AHEAD && is_copied)
    ask_copied<V, TOKENS>(sums, copied + KEY_DIM * COPIED_ROW<V>, first, shared.weights);
  else
    ask_changes(sums, call, head, column, first, inside, chunk, shared);
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    if (t >= count) break;
    const int i = first + t;
    const Number* source = value_of(call, row + t, head) + column;
    Columns<V> value, change;
#pragma unroll
    for (int v = 0; v < V; ++v)
      value.at[v] = IS_AHEAD ? to_float(values[t][v]) : inside ? to_float(source[v]) : 0.0f;
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

// The run that begins with a sequence of the step: of 32 V columns of a value head. With `copied`, memory for a copy of the
// state and of changes, these are on their way before the kernel before this one is done.
template <int V, bool IS_AHEAD>
__device__ inline void few_tokens(const Call& call, float* copied) {
  constexpr int PARTS = (VALUE_DIM + LANES * V - 1) / (LANES * V), TOKENS = 4;
  __shared__ ChunkShared chunk;
  __shared__ union {
    Shared<1> one;
    Shared<TOKENS> some;
  } shared;
  const int lane = threadIdx.x, head = blockIdx.y / PARTS, first_column = blockIdx.y % PARTS * LANES * V;
  const int column = first_column + lane * V;
  if (IS_AHEAD) let_next_start();
  int64 row = blockIdx.x;
  bool is_empty = false;
  if (!call.single) {
    row = call.starts[blockIdx.x];
    is_empty = call.starts[blockIdx.x + 1] <= row;
  }
  const int table = is_empty ? -1 : call.tables[row];
  int position = is_empty ? 0 : call.positions[row];
  if (table < 0 || in_step(call, row - 1, table, position - 1) ||
      (!call.single && in_step(call, row + call.limit, table, position + static_cast<int>(call.limit)))) {
    if (IS_AHEAD) wait_for_previous();
    return;
  }
  bool waits = IS_AHEAD;
  while (true) {
    const int begin = position / CHUNK * CHUNK;
    const bool has_state = begin > 0;
    const float* state = carried<const float>(call, call.state_places, head, table, begin);
    const int known = position - begin;
    if (waits && has_state) copy_rows<V>(copied, state + first_column, KEY_DIM, VALUE_DIM - first_column);
    const int count = rows_in_chunk(call, row, table, position);
    __syncwarp();
    for (int i = lane; i < BLOCKS; i += LANES)
      if (i * BLOCK_SIZE < known + count) chunk.blocks[i] = block_of(call, table, begin + i * BLOCK_SIZE);
    __syncwarp();
    if (waits) {
      for (int i = 0; i < known; i += BLOCK_SIZE)
        copy_rows<V>(
            copied + (KEY_DIM + i) * COPIED_ROW<V>, change_record(call, chunk.blocks[i / BLOCK_SIZE], head, i) + first_column,
            least(BLOCK_SIZE, known - i), VALUE_DIM - first_column);
      end_copies();
    }
    for (int j = lane; j < known; j += LANES) chunk.decays[j] = *decay_record(call, chunk.blocks[j / BLOCK_SIZE], head, j);
    const bool is_copied = waits;
    if (waits) {
      wait_for_previous();
      wait_for_copies<0>();
      waits = false;
    }
    if (count == 1) {
      compute_few<V, 1, IS_AHEAD>(
          call, row, head, column, state, has_state, known, 1, chunk, shared.one, copied, is_copied);
    } else {
      for (int t = 0; t < count; t += TOKENS)
        compute_few<V, TOKENS, IS_AHEAD>(
            call, row + t, head, column, state, has_state, known + t, least(TOKENS, count - t), chunk, shared.some,
            copied, is_copied && t == 0);
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
  few_tokens<1, false>(call, nullptr);
}

#if ALIGNED
extern "C" __global__ void __launch_bounds__(LANES, 16) few_tokens_2(const Call call) {
  begin_kernel();
  few_tokens<2, false>(call, nullptr);
}

extern "C" __global__ void __launch_bounds__(LANES, 16) few_tokens_4(const Call call) {
  begin_kernel();
  few_tokens<4, false>(call, nullptr);
}

// For so few programs that their copies fit into all multiprocessors' memory.
extern "C" __global__ void __launch_bounds__(LANES, 4) few_tokens_ahead(const Call call) {
  SHARED_MEMORY(copied);
  few_tokens<2, true>(call, copied);
}
#endif
