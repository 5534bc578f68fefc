// Prompts: chunks of up to 64 tokens at once, as products of matrices whose every number is one chain.
#pragma once

constexpr int MANY_THREADS = 256, MANY_WARPS = MANY_THREADS / LANES;

__device__ inline float element(const float4& x, int e) { return e == 0 ? x.x : e == 1 ? x.y : e == 2 ? x.z : x.w; }

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
  for (int index = 0; index < CHUNK; ++index) {
    __syncthreads();
    if (!(leads[index / LANES] >> index % LANES & 1u)) continue;
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
    for (int i = warp; i < end; i += MANY_WARPS) {
      float* record = key_record(call, block_of(call, table, begin + i), key_head, begin + i);
      float* key = keys + row_place(i, ROW);
      if (i < known) {
        copy_numbers(key, record, KEY_DIM, lane, LANES);
        continue;
      }
      const int64 own = row + (i - known);
      const Number* source = call.mixed + own * call.mixed_stride + key_head * KEY_DIM;
      float x[PIECES][4];
      read_normed(source, call.query_scale, x);
      write_vector(query_of(call, own, key_head), x);
      write_vector(queries + row_place(i, ROW), x);
      read_normed(source + KEY_HEADS * KEY_DIM, 1.0f, x);
      write_vector(record, x);
      write_vector(key, x);
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
constexpr int UNIT = 8;      // tokens whose changes are found one after the other by half a warp, 2 columns a lane
constexpr int UNITS = CHUNK / UNIT;
constexpr int ROWS_OF_A_THREAD = DELTA ? UNIT : UNIT / 2;

// What a program keeps in shared memory: numbers of 4 bytes.
constexpr int STATE_AT = 0;
constexpr int CHANGES_AT = STATE_AT + KEY_DIM * COLUMNS;
constexpr int SCORES_AT = CHANGES_AT + CHUNK * COLUMNS;
constexpr int QUERIES_AT = SCORES_AT + (DELTA ? 2 : 1) * SCORES_SIZE;
constexpr int KEYS_AT = QUERIES_AT + KEYS_SIZE;
constexpr int MOST_SHARED = 227 * 1024 / 4 - 1024;
constexpr int KEY_BUFFERS = KEYS_AT + 2 * KEYS_SIZE <= MOST_SHARED ? 2 : 1;

// A chunk of a run.
struct Part {
  int64 row;  // of the first new token
  int begin;  // of the chunk
  int known;  // tokens before that
  int end;    // behind the last new token, as counted from `begin`
};

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

__device__ inline void copy_scores(const Call& call, const Part& part, int key_head, float* scores) {
  constexpr int SHARERS = 16;  // threads of a row
  const int first = threadIdx.x / SHARERS, index = threadIdx.x % SHARERS;
#pragma unroll 4
  for (int i = part.known / 16 * 16 + first; i < part.end; i += MANY_THREADS / SHARERS) {
    if (i < part.known) continue;
    const int64 row = part.row + (i - part.known);
#pragma unroll
    for (int which = 0; which < (DELTA ? 2 : 1); ++which)
      copy_numbers(
          scores + which * SCORES_SIZE + row_place(i, SCORES_ROW), scores_of(call, row, key_head, which), i + 1, index,
          SHARERS);
  }
  end_copies();
}

struct Pair {
  float x, y;
};

__device__ inline Pair read2(const float* from) {
  const float2 found = *reinterpret_cast<const float2*>(from);
  return {found.x, found.y};
}

__device__ inline Pair add_product(float factor, const Pair& x, const Pair& total) {
  return {__fmaf_rn(factor, x.x, total.x), __fmaf_rn(factor, x.y, total.y)};
}

__device__ inline Pair scaled(const Pair& x, float factor) { return {__fmul_rn(x.x, factor), __fmul_rn(x.y, factor)}; }

// Two neighbouring numbers, whose address is a multiple of what both take.
__device__ inline void read_both(const Number* from, Number (&to)[2]) {
#if NUMBER == 0
  const float2 found = *reinterpret_cast<const float2*>(from);
  to[0] = found.x, to[1] = found.y;
#else
  const unsigned found = *reinterpret_cast<const unsigned*>(from);
  to[0] = static_cast<Number>(found), to[1] = static_cast<Number>(found >> 16);
#endif
}

// The run that begins with a sequence of the step: of COLUMNS columns of a value head.
extern "C" __global__ void __launch_bounds__(MANY_THREADS, 1) many_tokens(const Call call) {
  begin_kernel();
  constexpr int PARTS = (VALUE_DIM + COLUMNS - 1) / COLUMNS, ROWS = ROWS_OF_A_THREAD;
  SHARED_MEMORY(shared);
  __shared__ float decays[CHUNK], betas[CHUNK];
  __shared__ int64 blocks[BLOCKS];
  float* const state = shared + STATE_AT;
  float* const changes = shared + CHANGES_AT;
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
    blocks[thread] = block_of(call, table, part.begin + thread * BLOCK_SIZE);
  __syncthreads();

  // What a thread has of the products with the state: rows of keys (the first half of all warps, in the delta rule) or of
  // queries, and 2 columns.
  const int half = lane / (LANES / 2), column = lane % (LANES / 2) * 2;
  const bool has_keys = DELTA && warp < MANY_WARPS / 2;
  const int unit = DELTA ? warp % (MANY_WARPS / 2) * 2 + half : warp;
  const int in_unit = DELTA ? 0 : half * ROWS, first_row = unit * UNIT + in_unit;
  const int inside = least(most(VALUE_DIM - first_column - column, 0), 2);  // columns that there are

  int buffer = 0;
  bool has_state = part.begin > 0;
  copy_keys_and_queries(call, part, key_head, blocks, shared + KEYS_AT, queries);
  copy_scores(call, part, key_head, scores);
  if (has_state) {
    const float* source = carried<const float>(call, call.state_places, head, table, part.begin) + first_column;
    for (int k = warp; k < KEY_DIM; k += MANY_WARPS)
      if (first_column + lane < VALUE_DIM) state[k * COLUMNS + lane] = source[k * VALUE_DIM + lane];
      else state[k * COLUMNS + lane] = 0.0f;
  }
  while (true) {
    const float* const keys = shared + KEYS_AT + buffer * KEYS_SIZE;
    // Asked for now, needed behind the products with the state.
    Number value[ROWS][2];
    const bool needs_values = has_keys || !DELTA || SKIP;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int i = first_row + r;
      const bool is_new = needs_values && i >= part.known && i < part.end;
      const Number* source = value_of(call, part.row + (i - part.known), head) + first_column + column;
#pragma unroll
      for (int v = 0; v < 2; ++v) value[r][v] = Number(0);
      if (ALIGNED && is_new && inside == 2) {
        read_both(source, value[r]);
      } else {
#pragma unroll
        for (int v = 0; v < 2; ++v)
          if (is_new && v < inside) value[r][v] = source[v];
      }
    }
    float decay = 0.0f, beta = 0.0f;
    if (thread < part.end) {
      decay = *decay_record(call, blocks[thread / BLOCK_SIZE], head, thread);
      if (thread >= part.known) beta = beta_of(call, part.row + (thread - part.known), head);
    }
    Part next;
    next.row = part.row + (part.end - part.known);
    next.begin = part.begin + CHUNK;
    next.known = 0;
    const bool goes_on =
        thread < CHUNK && part.end == CHUNK && in_step(call, next.row + thread, table, next.begin + thread);
    int64 next_block = 0;
    if (thread < BLOCKS && part.end == CHUNK && in_step(call, next.row + thread * BLOCK_SIZE, table, next.begin + thread * BLOCK_SIZE))
      next_block = block_of(call, table, next.begin + thread * BLOCK_SIZE);
    if (part.known > 0) {
      for (int j = warp; j < part.known; j += MANY_WARPS) {
        const float* source = change_record(call, blocks[j / BLOCK_SIZE], head, j) + first_column;
        changes[j * COLUMNS + lane] = first_column + lane < VALUE_DIM ? source[lane] : 0.0f;
      }
    }
    wait_for_copies<KEY_BUFFERS == 2 ? 1 : 0>();  // keys and queries, not yet the scores
    __syncthreads();

    Pair sums[ROWS] = {};
    if (has_state) {
      const float* own = has_keys ? keys : queries;
#pragma unroll 2
      for (int k = 0; k < KEY_DIM; k += 4) {
        float4 a[ROWS];
        Pair b[4];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) a[r] = read4(own + row_place(first_row, ROW) + r * ROW + k);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (KEY_DIM % 4 == 0 || k + e < KEY_DIM) b[e] = read2(state + (k + e) * COLUMNS + column);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (KEY_DIM % 4 != 0 && k + e >= KEY_DIM) break;
#pragma unroll
          for (int r = 0; r < ROWS; ++r) sums[r] = add_product(element(a[r], e), b[e], sums[r]);
        }
      }
    }
    if (thread < CHUNK) decays[thread] = decay, betas[thread] = beta;
    wait_for_copies<0>();
    next.end = __syncthreads_count(goes_on);
    // Scores fade: a row is shared by 16 threads, each of which has 4 keys.
    for (int i = part.known / 16 * 16 + thread / 16; i < part.end; i += MANY_THREADS / 16) {
      const int j = thread % 16 * 4;
      if (i < part.known || j > i) continue;
      float fades[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) fades[e] = expf(__fsub_rn(decays[i], decays[least(j + e, i)]));
#pragma unroll
      for (int which = 0; which < (DELTA ? 2 : 1); ++which) {
        float4* place = reinterpret_cast<float4*>(scores + which * SCORES_SIZE + row_place(i, SCORES_ROW) + j);
        float4 x = *place;
        x.x = __fmul_rn(x.x, fades[0]), x.y = __fmul_rn(x.y, fades[1]);
        x.z = __fmul_rn(x.z, fades[2]), x.w = __fmul_rn(x.w, fades[3]);
        *place = x;
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sums[r] = scaled(sums[r], expf(decays[first_row + r]));
    float* records = nullptr;  // of the thread's rows, which are in one block
    if (first_row < part.end)
      records = change_record(call, blocks[first_row / BLOCK_SIZE], head, first_row) + first_column + column;
    __syncthreads();
    // This chunk's blocks and queries have been read.
    if (thread < BLOCKS) blocks[thread] = next_block;

    const float* const own_scores = scores + (has_keys ? SCORES_SIZE : 0) + row_place(first_row, SCORES_ROW);
    auto write_change = [&](int r, const Pair& change) {
      const int i = first_row + r;
      *reinterpret_cast<float2*>(changes + i * COLUMNS + column) = make_float2(change.x, change.y);
      float* record = records + r * VALUE_DIM;
      if (ALIGNED && inside == 2) {
        *reinterpret_cast<float2*>(record) = make_float2(change.x, change.y);
      } else {
        if (inside > 0) record[0] = change.x;
        if (inside > 1) record[1] = change.y;
      }
    };
    if (!DELTA) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int i = first_row + r;
        if (i < part.known || i >= part.end) continue;
        write_change(r, scaled({to_float(value[r][0]), to_float(value[r][1])}, betas[i]));
      }
    }
    const int units = (part.end + UNIT - 1) / UNIT;
    for (int u = 0; u < units; ++u) {
      if (has_keys && unit == u && part.known < u * UNIT + UNIT) {
        // Token by token: as soon as a change is known, the later ones of the unit are told.
        float4 taken[ROWS][2];
#pragma unroll
        for (int r = 1; r < ROWS; ++r) {
          taken[r][0] = read4(own_scores + r * SCORES_ROW + u * UNIT);
          if (r > 4) taken[r][1] = read4(own_scores + r * SCORES_ROW + u * UNIT + 4);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const int i = first_row + r;
          Pair change;
          if (i >= part.known) {
            change.x = __fmul_rn(betas[i], __fsub_rn(to_float(value[r][0]), sums[r].x));
            change.y = __fmul_rn(betas[i], __fsub_rn(to_float(value[r][1]), sums[r].y));
            if (i < part.end) write_change(r, change);
          } else {
            change = read2(changes + i * COLUMNS + column);
          }
#pragma unroll
          for (int later = r + 1; later < ROWS; ++later)
            sums[later] = add_product(element(taken[later][r / 4], r % 4), change, sums[later]);
        }
      }
      __syncthreads();
      if (u == 0 && KEY_BUFFERS == 2 && next.end > 0)
        copy_keys_and_queries(call, next, key_head, blocks, shared + KEYS_AT + (buffer ^ 1) * KEYS_SIZE, queries);
      if (unit < u || (has_keys && unit == u)) continue;
      Pair change[UNIT];
#pragma unroll
      for (int j = 0; j < UNIT; ++j) change[j] = read2(changes + (u * UNIT + j) * COLUMNS + column);
#pragma unroll
      for (int some = 0; some < UNIT; some += 4) {
        float4 factors[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) factors[r] = read4(own_scores + r * SCORES_ROW + u * UNIT + some);
        if (unit > u) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sums[r] = add_product(element(factors[r], e), change[some + e], sums[r]);
          }
        } else {  // a query's own unit: up to its own change
#pragma unroll
          for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
              if (some + e <= in_unit + r)
                sums[r] = add_product(element(factors[r], e), change[some + e], sums[r]);
          }
        }
      }
    }
    if (!has_keys) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int i = first_row + r;
        if (i < part.known || i >= part.end) continue;
        Pair result = sums[r];
#if SKIP
        const float factor = call.skip[head];
        const Pair given = {to_float(value[r][0]), to_float(value[r][1])};
        result = {__fmaf_rn(given.x, factor, result.x), __fmaf_rn(given.y, factor, result.y)};
#endif
        Number* out = call.out + (part.row + (i - part.known)) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM;
        if (inside > 0) out[first_column + column] = from_float(result.x);
        if (inside > 1) out[first_column + column + 1] = from_float(result.y);
      }
    }
    if (part.end < CHUNK) return;
    __syncthreads();
    // The scores have been read.
    if (next.end > 0) copy_scores(call, next, key_head, scores);
    const float last = decays[CHUNK - 1], left = expf(last);
    for (int at = thread * 4; at < CHUNK * COLUMNS; at += MANY_THREADS * 4) {
      const float fade = expf(__fsub_rn(last, decays[at / COLUMNS]));
      float4* place = reinterpret_cast<float4*>(changes + at);
      float4 x = *place;
      x.x = __fmul_rn(x.x, fade), x.y = __fmul_rn(x.y, fade), x.z = __fmul_rn(x.z, fade), x.w = __fmul_rn(x.w, fade);
      *place = x;
    }
    __syncthreads();
    // Of the next state a thread has 4 rows and 4 columns at a time. The run's last two states are kept.
    const bool is_kept = !in_step(call, next.row + CHUNK + CHUNK - 1, table, next.begin + CHUNK + CHUNK - 1);
    float* target = nullptr;
    if (is_kept) target = carried<float>(call, call.state_places, head, table, next.begin) + first_column;
    const int four = lane % 8 * 4;
    for (int k = warp * 16 + lane / 8 * 4; k < KEY_DIM; k += MANY_WARPS * 16) {
      float4 total[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        total[e] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (has_state && k + e < KEY_DIM) total[e] = read4(state + (k + e) * COLUMNS + four);
        total[e].x = __fmul_rn(total[e].x, left), total[e].y = __fmul_rn(total[e].y, left);
        total[e].z = __fmul_rn(total[e].z, left), total[e].w = __fmul_rn(total[e].w, left);
      }
#pragma unroll 4
      for (int j = 0; j < CHUNK; ++j) {
        const float4 key = read4(keys + row_place(j, ROW) + k), change = read4(changes + j * COLUMNS + four);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float factor = element(key, e);
          total[e].x = __fmaf_rn(factor, change.x, total[e].x), total[e].y = __fmaf_rn(factor, change.y, total[e].y);
          total[e].z = __fmaf_rn(factor, change.z, total[e].z), total[e].w = __fmaf_rn(factor, change.w, total[e].w);
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (k + e >= KEY_DIM) break;
        *reinterpret_cast<float4*>(state + (k + e) * COLUMNS + four) = total[e];
        if (!is_kept) continue;
#pragma unroll
        for (int v = 0; v < 4; ++v)
          if (first_column + four + v < VALUE_DIM) target[(k + e) * VALUE_DIM + four + v] = element(total[e], v);
      }
    }
    if (next.end == 0) return;
    if (KEY_BUFFERS == 1) {
      __syncthreads();  // the keys have been read
      copy_keys_and_queries(call, next, key_head, blocks, shared + KEYS_AT, queries);
    } else {
      buffer ^= 1;
    }
    has_state = true;
    part = next;
  }
}
