// Prompts: chunks of up to 64 tokens at once, as products of matrices whose every number is one chain.
#pragma once

constexpr int MANY_THREADS = 256, MANY_WARPS = MANY_THREADS / LANES;

// As `few_scores`, for the parts of runs that begin in CHUNK rows of the step.
extern "C" __global__ void __launch_bounds__(MANY_THREADS, 2) many_scores(const Call call) {
  begin_kernel();
  SHARED_MEMORY(shared);
  __shared__ unsigned leads[CHUNK / LANES];
  __shared__ int found[3];  // of the part: table, position, count
  const int key_head = blockIdx.y, thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
  if (thread < CHUNK) {
    const int64 row = static_cast<int64>(blockIdx.x) * CHUNK + thread;
    bool leads_part = false;
    if (row < call.rows && call.tables[row] >= 0) {
      const int position = call.positions[row];
      leads_part = position % CHUNK == 0 || !in_step(call, row - 1, call.tables[row], position - 1);
    }
    const unsigned all = __ballot_sync(ALL_LANES, leads_part);
    if (lane == 0) leads[warp] = all;
  }
  float* const keys = shared;
  float* const queries = shared + KEYS_SIZE;
  __syncthreads();
  unsigned left[CHUNK / LANES] = {leads[0], leads[1]};
  while ((left[0] | left[1]) != 0) {
    const int half = left[0] == 0 ? 1 : 0, index = half * LANES + __ffs(left[half]) - 1;
    left[half] &= left[half] - 1;
    __syncthreads();
    const int64 row = static_cast<int64>(blockIdx.x) * CHUNK + index;
    if (warp == 0) {
      const int table = call.tables[row], position = call.positions[row];
      const int count = rows_in_chunk(call, row, table, position);
      if (lane == 0) found[0] = table, found[1] = position, found[2] = count;
    }
    __syncthreads();
    const int table = found[0], position = found[1], count = found[2];
    if (count <= call.limit) continue;
    keep_last_inputs(call, row, table, position, count, MANY_THREADS);
    if (key_head == KEY_HEADS) {
      sum_decays(call, row, table, position, count, MANY_THREADS);
      continue;
    }
    const int begin = position / CHUNK * CHUNK, known = position - begin, end = known + count;
    constexpr int AT_ONCE = PIECES == 1 ? 4 : 1;
    for (int first = warp; first < end; first += AT_ONCE * MANY_WARPS) {
      Number given[AT_ONCE][2][PIECES][4];  // queries and keys, all of which are asked for at once
#pragma unroll
      for (int t = 0; t < AT_ONCE; ++t) {
        const int i = most(least(first + t * MANY_WARPS, end - 1), known);
        const Number* source = call.mixed + (row + (i - known)) * call.mixed_stride + key_head * KEY_DIM;
        read_vector(source, given[t][0]);
        read_vector(source + KEY_HEADS * KEY_DIM, given[t][1]);
      }
#pragma unroll
      for (int t = 0; t < AT_ONCE; ++t) {
        const int i = first + t * MANY_WARPS;
        if (i >= end) break;
        float* record = key_record(call, block_of(call, table, begin + i), key_head, begin + i);
        float* key = keys + row_place(i, ROW);
        if (i < known) {
          copy_numbers(key, record, KEY_DIM, lane, LANES);
          continue;
        }
        float x[PIECES][4];
        normed(given[t][0], call.query_scale, x);
        write_vector(query_of(call, row + (i - known), key_head), x);
        write_vector(queries + row_place(i, ROW), x);
        normed(given[t][1], 1.0f, x);
        write_vector(record, x);
        write_vector(key, x);
      }
    }
    end_copies();
    wait_for_copies<0>();
    __syncthreads();
    // A warp has a part of the scores; a thread those of every fourth row with every eighth key in it.
    constexpr int TOKENS = DELTA ? 8 : 4, KEYS = 4;
    const int which = DELTA ? warp / 4 : 0, part = DELTA ? warp % 4 : warp;
    const int first_row = part / 2 * (4 * TOKENS) + lane / 8, first_key = part % 2 * (8 * KEYS) + lane % 8;
    if (part % 2 * (8 * KEYS) >= part / 2 * (4 * TOKENS) + 4 * TOKENS) continue;  // behind all of these tokens
    const float* own = which == 0 ? queries : keys;
    float scores[TOKENS][KEYS] = {};
#pragma unroll 2
    for (int k = 0; k < KEY_DIM; k += 4) {
      float4 a[TOKENS], b[KEYS];
#pragma unroll
      for (int r = 0; r < TOKENS; ++r) a[r] = read4(own + row_place(first_row + 4 * r, ROW) + k);
#pragma unroll
      for (int c = 0; c < KEYS; ++c) b[c] = read4(keys + row_place(first_key + 8 * c, ROW) + k);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (KEY_DIM % 4 != 0 && k + e >= KEY_DIM) break;
#pragma unroll
        for (int r = 0; r < TOKENS; ++r) {
#pragma unroll
          for (int c = 0; c < KEYS; ++c) scores[r][c] = __fmaf_rn(element(a[r], e), element(b[c], e), scores[r][c]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < TOKENS; ++r) {
      const int i = first_row + 4 * r;
      if (i < known || i >= end) continue;
      float* target = scores_of(call, row + (i - known), key_head, which);
#pragma unroll
      for (int c = 0; c < KEYS; ++c)
        if (first_key + 8 * c <= i - which) target[first_key + 8 * c] = scores[r][c];
    }
  }
}

constexpr int COLUMNS = 32;  // of a value head that a program has

// What a program keeps in shared memory: numbers of 4 bytes.
constexpr int STATE_AT = 0;
constexpr int CHANGES_AT = STATE_AT + KEY_DIM * COLUMNS;  // what the state says of a key, until its change is known
constexpr int FADED_AT = CHANGES_AT + CHUNK * COLUMNS;    // changes that have faded until the chunk's end
constexpr int VALUES_AT = FADED_AT + CHUNK * COLUMNS;
constexpr int SCORES_AT = VALUES_AT + CHUNK * COLUMNS;
constexpr int QUERIES_AT = SCORES_AT + (DELTA ? 2 : 1) * SCORES_SIZE;
constexpr int KEYS_AT = QUERIES_AT + KEYS_SIZE;
constexpr int MOST_SHARED = 227 * 1024 / 4 - 1024;
constexpr int KEY_BUFFERS = KEYS_AT + 2 * KEYS_SIZE <= MOST_SHARED ? 2 : 1;

// Rows of four tokens that lie four rows apart are read at once, by lanes that have neighbouring tokens or columns.
__device__ inline int score_place(int token) { return token * SCORES_ROW + token / 4 * 4; }
__device__ inline int change_place(int token, int column) { return token * COLUMNS + (column ^ token / 4 % 4 * 8); }

// A chunk of a run.
struct Part {
  int64 row;  // of the first new token
  int begin;  // of the chunk
  int known;  // tokens before that
  int end;    // behind the last new token, as counted from `begin`
};

// Which 4 columns and which of 4 neighbouring rows of a product a lane has: such that of each two reads of 16 bytes one is
// the same for lanes that differ in bit 0, the other for those that differ in bit 1, which a multiprocessor then serves at once.
struct Place {
  int warp, row, column;
};

__device__ inline Place place_of(int warp, int lane) {
  const int row = (lane >> 1 & 1) | (lane >> 2 & 2), fours = (lane & 1) | (lane >> 1 & 2) | (lane >> 2 & 4);
  return {warp, row, fours * 4};
}

// The r-th of a thread's tokens, where `warps` warps share the chunk.
__device__ inline int token_of(const Place& place, int r, int warps) { return (r * warps + place.warp) * 4 + place.row; }

__device__ inline void copy_keys_and_queries(
    const Call& call, const Part& part, int key_head, const int64* blocks, float* keys, float* queries) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
#pragma unroll 4
  for (int i = warp; i < part.end; i += MANY_WARPS) {
    copy_numbers(keys + row_place(i, ROW), key_record(call, blocks[i / BLOCK_SIZE], key_head, i), KEY_DIM, lane, LANES);
    if (i >= part.known)
      copy_numbers(
          queries + row_place(i, ROW), query_of(call, part.row + (i - part.known), key_head), KEY_DIM, lane, LANES);
  }
  end_copies();
}

constexpr int SHARERS = 16;  // threads of a row of scores, each of which has 4 keys

__device__ inline void copy_scores(const Call& call, const Part& part, int key_head, float* scores) {
  const int j = threadIdx.x % SHARERS * 4;
#pragma unroll
  for (int i = threadIdx.x / SHARERS; i < CHUNK; i += MANY_THREADS / SHARERS) {
    if (i < part.known || i >= part.end || j > i) continue;
    const int64 row = part.row + (i - part.known);
#pragma unroll
    for (int which = 0; which < (DELTA ? 2 : 1); ++which)
      copy16_async(scores + which * SCORES_SIZE + score_place(i) + j, scores_of(call, row, key_head, which) + j);
  }
  end_copies();
}

// Each thread has those that it has copied.
__device__ inline void fade_scores(const Part& part, const float* decays, float* scores) {
  const int j = threadIdx.x % SHARERS * 4;
#pragma unroll
  for (int i = threadIdx.x / SHARERS; i < CHUNK; i += MANY_THREADS / SHARERS) {
    if (i < part.known || i >= part.end || j > i) continue;
    const float now = decays[i];
    float fades[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) fades[e] = expf(__fsub_rn(now, decays[least(j + e, i)]));
#pragma unroll
    for (int which = 0; which < (DELTA ? 2 : 1); ++which) {
      float4* place = reinterpret_cast<float4*>(scores + which * SCORES_SIZE + score_place(i) + j);
      float4 x = *place;
      x.x = __fmul_rn(x.x, fades[0]), x.y = __fmul_rn(x.y, fades[1]);
      x.z = __fmul_rn(x.z, fades[2]), x.w = __fmul_rn(x.w, fades[3]);
      *place = x;
    }
  }
}

// x times each of y, added to four chains.
__device__ inline void add_product(float x, const float4& y, float (&total)[4]) {
#pragma unroll
  for (int v = 0; v < 4; ++v) total[v] = __fmaf_rn(x, element(y, v), total[v]);
}

// Vectors of R tokens a thread times the state, in order of its rows; what the next step needs is read before this one's
// sums.
template <int R, int WARPS>
__device__ inline void ask_state(float (&sums)[R][4], const float* vectors, const float* state, const Place& place) {
  float4 a[R], b[4], next_a[R], next_b[4];
  const float* own[R];
#pragma unroll
  for (int r = 0; r < R; ++r) own[r] = vectors + row_place(token_of(place, r, WARPS), ROW);
  auto read = [&](int k) {
#pragma unroll
    for (int r = 0; r < R; ++r) next_a[r] = read4(own[r] + k);
#pragma unroll
    for (int e = 0; e < 4; ++e) next_b[e] = read4(state + least(k + e, KEY_DIM - 1) * COLUMNS + place.column);
  };
  read(0);
#pragma unroll 4
  for (int k = 0; k < KEY_DIM; k += 4) {
#pragma unroll
    for (int r = 0; r < R; ++r) a[r] = next_a[r];
#pragma unroll
    for (int e = 0; e < 4; ++e) b[e] = next_b[e];
    read(k + 4 < KEY_DIM ? k + 4 : 0);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (KEY_DIM % 4 != 0 && k + e >= KEY_DIM) break;
#pragma unroll
      for (int r = 0; r < R; ++r) add_product(element(a[r], e), b[e], sums[r]);
    }
  }
}

// What the changes say to the tokens' queries, in order: to each those of the tokens up to itself.
template <int R, int WARPS>
__device__ inline void ask_changes(
    float (&sums)[R][4], const float* scores, const float* changes, const Place& place, int end) {
#pragma unroll
  for (int m = 0; m < R; ++m) {
#pragma unroll 2
    for (int w = 0; w < WARPS; ++w) {
      const int first = (m * WARPS + w) * 4;
      if (first >= end) break;
      float4 change[4], factors[R];
#pragma unroll
      for (int e = 0; e < 4; ++e) change[e] = read4(changes + change_place(first + e, place.column));
#pragma unroll
      for (int r = m; r < R; ++r) factors[r] = read4(scores + score_place(token_of(place, r, WARPS)) + first);
      if (w <= place.warp) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (w < place.warp || e <= place.row) add_product(element(factors[m], e), change[e], sums[m]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int r = m + 1; r < R; ++r) add_product(element(factors[r], e), change[e], sums[r]);
      }
    }
  }
}

struct alignas(16) Chunk {
  float decays[CHUNK], betas[CHUNK];
  float since[CHUNK], fades[CHUNK];  // from the chunk's begin to a token, and from there to its end
};

// The changes of 8 columns, by a warp: 4 lanes share a column, each of which has every fourth four of tokens. A four is
// found by its lane, one token after the other, and told to the others.
__device__ inline void find_changes(
    const Call& call, const Part& part, int head, int first_column, const int64* blocks, const Chunk& chunk,
    const float* values, const float* scores, float* changes, float* faded) {
  constexpr int OWN = CHUNK / 16;
  const int lane = threadIdx.x % LANES, sharer = lane / 8, column = threadIdx.x / LANES * 8 + lane % 8;
  const bool is_inside = first_column + column < VALUE_DIM;
  float sums[OWN][4], given[OWN][4];
  float4 betas[OWN];
#pragma unroll
  for (int m = 0; m < OWN; ++m) {
    const int first = m * 16 + sharer * 4;
    betas[m] = read4(chunk.betas + first);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      sums[m][r] = changes[change_place(first + r, column)];
      given[m][r] = values[change_place(first + r, column)];
    }
  }
  const float* own = scores + score_place(sharer * 4);  // 16 tokens further: 16 * SCORES_ROW + 16
  constexpr int FURTHER = 16 * SCORES_ROW + 16;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < OWN; ++m) {
    float4 near[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) near[r] = read4(own + m * FURTHER + r * SCORES_ROW + m * 16);
#pragma unroll 1
    for (int which = 0; which < 4; ++which) {
      const int first = m * 16 + which * 4;
      if (first >= part.end) break;
      float4 far[OWN][4];
#pragma unroll
      for (int later = m + 1; later < OWN; ++later) {
#pragma unroll
        for (int r = 0; r < 4; ++r) far[later][r] = read4(own + later * FURTHER + r * SCORES_ROW + first);
      }
      float told[4], found[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) told[r] = sums[m][r];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        found[r] = __fmul_rn(element(betas[m], r), __fsub_rn(given[m][r], told[r]));
        if (first + r < part.known) found[r] = changes[change_place(first + r, column)];
#pragma unroll
        for (int later = r + 1; later < 4; ++later) told[later] = __fmaf_rn(element(near[later], r), found[r], told[later]);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) found[r] = __shfl_sync(ALL_LANES, found[r], which * 8 + lane % 8);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) sums[m][r] = __fmaf_rn(element(near[r], j), found[j], sums[m][r]);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) near[r] = read4(own + m * FURTHER + r * SCORES_ROW + least(first + 4, CHUNK - 4));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int later = m + 1; later < OWN; ++later) {
#pragma unroll
          for (int r = 0; r < 4; ++r) sums[later][r] = __fmaf_rn(element(far[later][r], j), found[j], sums[later][r]);
        }
      }
      // Each of the sharers writes one.
      const int i = first + sharer;
      const float change = sharer == 0 ? found[0] : sharer == 1 ? found[1] : sharer == 2 ? found[2] : found[3];
      faded[change_place(i, column)] = __fmul_rn(change, chunk.fades[i]);
      if (i < part.known) continue;
      changes[change_place(i, column)] = change;
      if (i < part.end && is_inside) change_record(call, blocks[i / BLOCK_SIZE], head, i)[first_column + column] = change;
    }
  }
}

// 4 neighbouring numbers, of which `inside` are there.
__device__ inline void write_numbers(Number* to, int inside, const float (&x)[4]) {
#if ALIGNED && NUMBER != 0
  if (inside <= 0) return;
  unsigned both[2];
  for (int v = 0; v < 2; ++v)
    both[v] = static_cast<unsigned>(from_float(x[2 * v])) | static_cast<unsigned>(from_float(x[2 * v + 1])) << 16;
  *reinterpret_cast<float2*>(to) = make_float2(__uint_as_float(both[0]), __uint_as_float(both[1]));
#else
#pragma unroll
  for (int v = 0; v < 4; ++v)
    if (v < inside) to[v] = from_float(x[v]);
#endif
}

// The run that begins with a sequence of the step: of COLUMNS columns of a value head. In the delta rule half of the warps
// find the changes while the others multiply the queries with the state.
extern "C" __global__ void __launch_bounds__(MANY_THREADS, 1) many_tokens(const Call call) {
  begin_kernel();
  constexpr int PARTS = (VALUE_DIM + COLUMNS - 1) / COLUMNS;
  constexpr int ALL_ROWS = CHUNK / 4 / MANY_WARPS;                      // of a thread, where all warps share the chunk
  constexpr int ASKING = DELTA ? MANY_WARPS / 2 : MANY_WARPS, ROWS = CHUNK / 4 / ASKING;  // warps and rows of the queries
  constexpr int FIRST_ASKING = MANY_WARPS - ASKING;
  SHARED_MEMORY(shared);
  __shared__ Chunk chunk;
  __shared__ int64 both_blocks[2][BLOCKS];
  __shared__ int is_kept;
  float* const state = shared + STATE_AT;
  float* const changes = shared + CHANGES_AT;
  float* const faded = shared + FADED_AT;
  float* const values = shared + VALUES_AT;
  float* const scores = shared + SCORES_AT;
  float* const queries = shared + QUERIES_AT;
  const int thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
  const int head = blockIdx.y / PARTS, key_head = head / HEADS_OF_A_KEY, first_column = blockIdx.y % PARTS * COLUMNS;
  Part part;
  part.row = call.starts[blockIdx.x];
  if (call.starts[blockIdx.x + 1] <= part.row) return;
  const int table = call.tables[part.row], position = call.positions[part.row];
  if (table < 0 || in_step(call, part.row - 1, table, position - 1)) return;
  if (!in_step(call, part.row + call.limit, table, position + static_cast<int>(call.limit))) return;
  part.begin = position / CHUNK * CHUNK;
  part.known = position - part.begin;
  part.end = part.known + __syncthreads_count(
      thread < CHUNK - part.known && in_step(call, part.row + thread, table, position + thread));
  if (thread < BLOCKS && thread * BLOCK_SIZE < part.end)
    both_blocks[0][thread] = block_of(call, table, part.begin + thread * BLOCK_SIZE);
  __syncthreads();

  const Place all = place_of(warp, lane), asking = place_of(warp - FIRST_ASKING, lane);
  const bool asks = warp >= FIRST_ASKING;
  const int asker = thread - FIRST_ASKING * LANES;
  const int inside = least(most(VALUE_DIM - first_column - all.column, 0), 4);  // columns that there are

  int turn = 0, buffer = 0;
  bool has_state = part.begin > 0;
  copy_keys_and_queries(call, part, key_head, both_blocks[0], shared + KEYS_AT, queries);
  copy_scores(call, part, key_head, scores);
  if (has_state) {
    const float* source = carried<const float>(call, call.state_places, head, table, part.begin) + first_column;
    for (int k = warp; k < KEY_DIM; k += MANY_WARPS)
      state[k * COLUMNS + lane] = first_column + lane < VALUE_DIM ? source[k * VALUE_DIM + lane] : 0.0f;
  }
  for (int j = warp; j < part.known; j += MANY_WARPS) {
    const float* source = change_record(call, both_blocks[0][j / BLOCK_SIZE], head, j) + first_column;
    changes[change_place(j, lane)] = first_column + lane < VALUE_DIM ? source[lane] : 0.0f;
  }
  // A chunk's values, decays and gates are asked for before the last part of the work on the chunk before it.
  Number value[ALL_ROWS][4], gate = Number(0);
  float decay = 0.0f;
  auto ask_inputs = [&](const Part& of, const int64* blocks) {
#pragma unroll
    for (int r = 0; r < ALL_ROWS; ++r) {
      const int i = token_of(all, r, MANY_WARPS);
      const bool is_new = i >= of.known && i < of.end;
      const int64 row = is_new ? of.row + (i - of.known) : of.row;
      read_numbers(value_of(call, row, head) + first_column + all.column, is_new ? inside : 0, value[r]);
    }
    if (thread < of.end) {
      decay = *decay_record(call, blocks[thread / BLOCK_SIZE], head, thread);
      if (thread >= of.known) gate = beta_gate(call, of.row + (thread - of.known), head);
    }
  };
  ask_inputs(part, both_blocks[0]);
  while (true) {
    const float* const keys = shared + KEYS_AT + buffer * KEYS_SIZE;
    const int64* const blocks = both_blocks[turn];
    if (thread < CHUNK) {
      chunk.decays[thread] = decay;
      chunk.betas[thread] = beta_of(call, gate, head);
      chunk.since[thread] = expf(decay);
    }
#pragma unroll
    for (int r = 0; r < ALL_ROWS; ++r)
      *reinterpret_cast<float4*>(values + change_place(token_of(all, r, MANY_WARPS), all.column)) = make_float4(
          to_float(value[r][0]), to_float(value[r][1]), to_float(value[r][2]), to_float(value[r][3]));
    wait_for_copies<1>();  // keys and queries, not yet the scores
    __syncthreads();

    if (thread < CHUNK) chunk.fades[thread] = expf(__fsub_rn(chunk.decays[CHUNK - 1], decay));
    if (DELTA) {
      float sums[ALL_ROWS][4] = {};
      if (has_state) ask_state<ALL_ROWS, MANY_WARPS>(sums, keys, state, all);
#pragma unroll
      for (int r = 0; r < ALL_ROWS; ++r) {
        const int i = token_of(all, r, MANY_WARPS);
        const float since = chunk.since[i];
        if (i >= part.known)
          *reinterpret_cast<float4*>(changes + change_place(i, all.column)) = make_float4(
              __fmul_rn(sums[r][0], since), __fmul_rn(sums[r][1], since), __fmul_rn(sums[r][2], since),
              __fmul_rn(sums[r][3], since));
      }
    }
    wait_for_copies<0>();
    fade_scores(part, chunk.decays, scores);
    __syncthreads();

    Part next;
    next.row = part.row + (part.end - part.known);
    next.begin = part.begin + CHUNK;
    next.known = 0;
    float asked[ROWS][4] = {};
    bool goes_on = false;
    if (asks) {
      // Which rows the next chunk has, where; and whether a state is one of the run's last two, which are kept.
      const bool is_full = part.end == CHUNK;
      const int ahead = asker == CHUNK ? 2 * CHUNK - 1 : asker;
      const bool may_go_on = is_full && asker <= CHUNK && next.row + ahead < call.rows;
      int its_table = -1, its_position = 0;
      if (may_go_on) its_table = call.tables[next.row + ahead], its_position = call.positions[next.row + ahead];
      if (has_state) ask_state<ROWS, ASKING>(asked, queries, state, asking);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float since = chunk.since[token_of(asking, r, ASKING)];
#pragma unroll
        for (int v = 0; v < 4; ++v) asked[r][v] = __fmul_rn(asked[r][v], since);
      }
      const bool is_there = its_table == table && its_position == next.begin + ahead;
      if (asker == CHUNK) is_kept = !is_there;
      goes_on = asker < CHUNK && is_there;
      if (goes_on && asker % BLOCK_SIZE == 0)
        both_blocks[turn ^ 1][asker / BLOCK_SIZE] = block_of(call, table, next.begin + asker);
    }
    if (DELTA) {
      if (!asks)
        find_changes(
            call, part, head, first_column, blocks, chunk, values, scores + SCORES_SIZE, changes, faded);
    } else {
#pragma unroll
      for (int r = 0; r < ALL_ROWS; ++r) {
        const int i = token_of(all, r, MANY_WARPS);
        float* record = nullptr;
        if (i >= part.known && i < part.end)
          record = change_record(call, blocks[i / BLOCK_SIZE], head, i) + first_column + all.column;
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const int place = change_place(i, all.column + v);
          const float change = i < part.known ? changes[place] : __fmul_rn(chunk.betas[i], values[place]);
          changes[place] = change;
          faded[place] = __fmul_rn(change, chunk.fades[i]);
          if (record != nullptr && v < inside) record[v] = change;
        }
      }
    }
    next.end = __syncthreads_count(goes_on);
    // The queries have been read, and all changes are known.
    const int64* const next_blocks = both_blocks[turn ^ 1];
    if (next.end > 0) {
      if (KEY_BUFFERS == 2)
        copy_keys_and_queries(call, next, key_head, next_blocks, shared + KEYS_AT + (buffer ^ 1) * KEYS_SIZE, queries);
      ask_inputs(next, next_blocks);
    }
    if (asks) {
      ask_changes<ROWS, ASKING>(asked, scores, changes, asking, part.end);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int i = token_of(asking, r, ASKING);
        if (i < part.known || i >= part.end) continue;
#if SKIP
        const float factor = call.skip[head];
        const float4 given = read4(values + change_place(i, asking.column));
        add_product(factor, given, asked[r]);
#endif
        Number* out = call.out + (part.row + (i - part.known)) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM;
        write_numbers(out + first_column + asking.column, inside, asked[r]);
      }
    }
    if (part.end < CHUNK) return;
    // Of the next state a thread has 4 rows and 4 columns at a time.
    const float left = chunk.since[CHUNK - 1];
    float* target = nullptr;
    if (is_kept) target = carried<float>(call, call.state_places, head, table, next.begin) + first_column + all.column;
    for (int k = warp * 16 + all.row * 4; k < KEY_DIM; k += MANY_WARPS * 16) {
      float total[4][4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float4 now = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (has_state && k + e < KEY_DIM) now = read4(state + (k + e) * COLUMNS + all.column);
#pragma unroll
        for (int v = 0; v < 4; ++v) total[e][v] = __fmul_rn(element(now, v), left);
      }
      constexpr int SOME = 4;
      float4 key[SOME], change[SOME], next_key[SOME], next_change[SOME];
      auto read = [&](int j) {
#pragma unroll
        for (int e = 0; e < SOME; ++e) {
          next_key[e] = read4(keys + row_place(j, ROW) + e * ROW + k);
          next_change[e] = read4(faded + change_place(j + e, all.column));
        }
      };
      read(0);
#pragma unroll 2
      for (int j = 0; j < CHUNK; j += SOME) {
#pragma unroll
        for (int e = 0; e < SOME; ++e) key[e] = next_key[e], change[e] = next_change[e];
        read(j + SOME < CHUNK ? j + SOME : 0);
#pragma unroll
        for (int one = 0; one < SOME; ++one) {
#pragma unroll
          for (int e = 0; e < 4; ++e) add_product(element(key[one], e), change[one], total[e]);
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (k + e >= KEY_DIM) break;
        *reinterpret_cast<float4*>(state + (k + e) * COLUMNS + all.column) =
            make_float4(total[e][0], total[e][1], total[e][2], total[e][3]);
        if (!is_kept) continue;
#pragma unroll
        for (int v = 0; v < 4; ++v)
          if (v < inside) target[(k + e) * VALUE_DIM + v] = total[e][v];
      }
    }
    if (next.end == 0) return;
    __syncthreads();
    // Keys, scores and changes have been read.
    if (KEY_BUFFERS == 1)
      copy_keys_and_queries(call, next, key_head, next_blocks, shared + KEYS_AT, queries);
    else
      buffer ^= 1;
    copy_scores(call, next, key_head, scores);
    turn ^= 1;
    has_state = true;
    part = next;
  }
}
