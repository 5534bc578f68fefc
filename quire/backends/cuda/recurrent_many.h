// Prompts: chunks of up to 64 tokens at once, as products of matrices whose every number is one chain.
#pragma once

constexpr int MANY_THREADS = 256, MANY_WARPS = MANY_THREADS / LANES;

// By a warp: the scores of 4 * TOKENS of a chunk's tokens with 32 keys. A thread has every fourth token and every eighth key.
template <int TOKENS>
__device__ inline void score(
    const Call& call, int64 row, int key_head, int known, int end, int which, int begin, int other, const float* queries,
    const float* keys) {
  constexpr int KEYS = 4;
  if (begin >= end || begin + 4 * TOKENS <= known) return;
  const int lane = threadIdx.x % LANES, first_row = begin + lane / 8, first_key = other + lane % 8;
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

// As `few_scores`, for the parts of runs that begin in CHUNK rows of the step.
extern "C" __global__ void __launch_bounds__(MANY_THREADS, 2) many_scores(const Call call) {
  begin_kernel();
  SHARED_MEMORY(shared);
  __shared__ unsigned leads[CHUNK / LANES];
  __shared__ int found[3];  // of the part: table, position, count
  // decays, which are one sum after the other, are begun first
  const int key_head = blockIdx.y == 0 ? KEY_HEADS : blockIdx.y - 1;
  const int thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
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
  unsigned first_half = leads[0], second_half = leads[1];
  while ((first_half | second_half) != 0) {
    const int index = first_half != 0 ? __ffs(first_half) - 1 : LANES + __ffs(second_half) - 1;
    if (first_half != 0)
      first_half &= first_half - 1;
    else
      second_half &= second_half - 1;
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
      int64 blocks[AT_ONCE];
#pragma unroll
      for (int t = 0; t < AT_ONCE; ++t) {
        const int i = most(least(first + t * MANY_WARPS, end - 1), known);
        const Number* source = call.mixed + (row + (i - known)) * call.mixed_stride + key_head * KEY_DIM;
        read_vector(source, given[t][0]);
        read_vector(source + KEY_HEADS * KEY_DIM, given[t][1]);
        blocks[t] = block_of(call, table, begin + least(first + t * MANY_WARPS, end - 1));
      }
#pragma unroll
      for (int t = 0; t < AT_ONCE; ++t) {
        const int i = first + t * MANY_WARPS;
        if (i >= end) break;
        float* record = key_record(call, blocks[t], key_head, begin + i);
        float* key = keys + row_place(i, ROW);
        if (i < known) {
          copy_numbers(key, record, KEY_DIM, lane, LANES);
          continue;
        }
        float x[PIECES][4];
        normed(given[t][0], call.query_scale, x);
        write_vector<true>(query_of(call, row + (i - known), key_head), x);
        write_vector<false>(queries + row_place(i, ROW), x);
        normed(given[t][1], 1.0f, x);
        write_vector<true>(record, x);
        write_vector<false>(key, x);
      }
    }
    end_copies();
    wait_for_copies<0>();
    __syncthreads();
    // Of the rows the first four warps have 32 with the first 32 keys, or without the delta rule 16; the other ones, half as
    // many with the other keys, which only the last rows see. So each scheduler of a multiprocessor has one warp of both kinds.
    constexpr int TOKENS = DELTA ? 8 : 4;
    if (warp < 4)
      score<TOKENS>(call, row, key_head, known, end, DELTA ? warp / 2 : 0, warp % (DELTA ? 2 : 4) * (4 * TOKENS), 0, queries, keys);
    else
      score<TOKENS / 2>(
          call, row, key_head, known, end, DELTA ? warp / 2 - 2 : 0, 32 + warp % (DELTA ? 2 : 4) * (2 * TOKENS), 32, queries, keys);
  }
}

// A program of `many_tokens` has 32, 64 or 128 columns of a value head. Wider ones do more sums for each number that they
// read from shared memory; narrower ones are more programs. Numbers do not depend on the width.
constexpr int FINDERS = MANY_WARPS / 2;  // warps that find the changes of the delta rule, and the keys' products for it
constexpr int ASKERS = DELTA ? MANY_WARPS - FINDERS : MANY_WARPS;  // those that have the queries
constexpr int FIRST_ASKER = MANY_WARPS - ASKERS;
constexpr int SOLVED = 16;  // tokens whose changes are found before others are told of them

// Vectors of tokens lie in rows of whole 32 numbers, in which fours are exchanged: those of 8 neighbouring tokens at one
// channel lie in different banks, and so do those of a score's 8 tokens at one key.
constexpr int VECTOR = (KEY_DIM + 31) / 32 * 32, VECTORS = CHUNK * VECTOR;
__device__ inline int vector_place(int token, int k) { return token * VECTOR + (k ^ token % 8 * 4); }
__device__ inline int score_place(int token, int key) { return token * CHUNK + (key ^ token % 8 * 4); }

// Changes lie in rows of a program's columns, in which eights are exchanged: so that 4 neighbouring tokens' numbers, which a
// quarter of a warp writes at once, lie in different banks. Of the state's rows every other four is exchanged, which costs its
// products nothing.
template <int COLUMNS>
__device__ inline int change_place(int token, int column) { return token * COLUMNS + (column ^ token % 4 * 8); }
template <int COLUMNS>
__device__ inline int state_place(int k, int column) { return k * COLUMNS + (column ^ k / 4 % 2 * 8); }

// How a program of so many columns is divided. A thread has fours of columns that lie 16 apart, and rows that lie 8 apart.
template <int COLUMNS>
struct Width {
  static constexpr int FOURS = COLUMNS == 32 ? 1 : 2, OWN = 4 * FOURS;
  static constexpr int COLUMN_WARPS = COLUMNS / (4 * OWN);
  static constexpr int ROW_WARPS = ASKERS / COLUMN_WARPS;        // of those that have all tokens of a product
  static constexpr int ROWS = CHUNK / 8 / ROW_WARPS;
  static constexpr int KEY_FOURS = COLUMNS == 128 ? 2 : 1;       // of 4 of the state's rows, 32 apart
  static constexpr int KEY_WARPS = MANY_WARPS / COLUMN_WARPS;
  static constexpr int SOLVERS = FINDERS / (COLUMNS / LANES);    // warps that take turns to find a column's changes
  static constexpr int READERS = COLUMNS / 4, READS = CHUNK * READERS / MANY_THREADS;  // of values
  // What a program keeps in shared memory: numbers of 4 bytes. Keys and queries, which change places with each chunk, are
  // first: reads of what is ahead, for nothing after the last, end in other memory of the program.
  static constexpr int SCORES_AT = 2 * VECTORS;
  static constexpr int STATE_AT = SCORES_AT + (DELTA ? 2 : 1) * CHUNK * CHUNK;
  static constexpr int CHANGES_AT = STATE_AT + KEY_DIM * COLUMNS;  // what the state says of a key, until its change is known
  static constexpr int VALUES_AT = CHANGES_AT + CHUNK * COLUMNS;   // later changes that have faded until the chunk's end
  static constexpr int SIZE = VALUES_AT + CHUNK * COLUMNS;
};

// A chunk of a run.
struct Part {
  int64 row;  // of the first new token
  int begin;  // of the chunk
  int known;  // tokens before that
  int end;    // behind the last new token, as counted from `begin`

  // The row of the chunk's first token, as if it were in the step: others are so many rows further, which the compiler can
  // make one sum of.
  __device__ inline int64 first_row() const { return row - known; }
};

struct alignas(16) Chunk {
  float decays[CHUNK], betas[CHUNK];
  float since[CHUNK], fades[CHUNK];  // from the chunk's begin to a token, and from there to its end
};

// What a program keeps beside it, of this chunk and the next.
struct alignas(16) Run {
  Chunk chunks[2];
  int64 blocks[2][BLOCKS];
  int is_kept;
};

// Which rows and columns of a product a lane has: such that of each two reads of 16 bytes one is the same for lanes that
// differ in bit 0, the other for those that differ in bit 1, which a multiprocessor then serves at once.
struct Place {
  int warp, row, column;
};

template <int COLUMNS>
__device__ inline Place place_of(int warp, int lane) {
  constexpr int WARPS = Width<COLUMNS>::COLUMN_WARPS;
  const int row = (lane >> 1 & 3) | (lane >> 2 & 4), four = (lane & 1) | (lane >> 2 & 2);
  return {warp / WARPS, row, warp % WARPS * (4 * Width<COLUMNS>::OWN) + four * 4};
}

template <int COLUMNS>
__device__ inline int token_of(const Place& place, int r) {
  return (r * Width<COLUMNS>::ROW_WARPS + place.warp) * 8 + place.row;
}

__device__ inline void copy_vector(float* vectors, int token, const float* from, int lane) {
#if ALIGNED
  for (int k = 4 * lane; k < KEY_DIM; k += 4 * LANES) copy16_async(vectors + vector_place(token, k), from + k);
#else
  for (int k = lane; k < KEY_DIM; k += LANES) vectors[vector_place(token, k)] = from[k];
#endif
}

__device__ inline void copy_keys(const Call& call, const Part& part, int key_head, const int64* blocks, float* keys) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
#pragma unroll 4
  for (int i = warp; i < part.end; i += MANY_WARPS)
    copy_vector(keys, i, key_record(call, blocks[i / BLOCK_SIZE], key_head, i), lane);
  end_copies();
}

__device__ inline void copy_queries(const Call& call, const Part& part, int key_head, float* queries) {
  const int asker = threadIdx.x / LANES - FIRST_ASKER, lane = threadIdx.x % LANES;
  if (asker >= 0) {
    const float* const first = query_of(call, part.first_row(), key_head);
#pragma unroll 4
    for (int i = asker; i < part.end; i += ASKERS)
      if (i >= part.known) copy_vector(queries, i, first + i * (KEY_HEADS * KEY_DIM), lane);
  }
  end_copies();
}

constexpr int SHARERS = 16;  // threads of a row of scores, each of which has 4 keys

__device__ inline void copy_scores(const Call& call, const Part& part, int key_head, float* scores) {
  const int j = threadIdx.x % SHARERS * 4;
  const float* const first = scores_of(call, part.first_row(), key_head, 0) + j;
#pragma unroll
  for (int i = threadIdx.x / SHARERS; i < CHUNK; i += MANY_THREADS / SHARERS) {
    if (i < part.known || i >= part.end || j > i) continue;
#pragma unroll
    for (int which = 0; which < (DELTA ? 2 : 1); ++which)
      copy16_async(scores + which * CHUNK * CHUNK + score_place(i, j), first + (i * KEY_HEADS * 2 + which) * CHUNK);
  }
  end_copies();
}

// Each thread has those that it has copied; and places that nobody reads, as without branches all are on their way at once.
__device__ inline void fade_scores(const float* decays, float* scores) {
  const int j = threadIdx.x % SHARERS * 4;
#pragma unroll
  for (int i = threadIdx.x / SHARERS; i < CHUNK; i += MANY_THREADS / SHARERS) {
    const float now = decays[i];
    float fades[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) fades[e] = expf(__fsub_rn(now, decays[least(j + e, i)]));
#pragma unroll
    for (int which = 0; which < (DELTA ? 2 : 1); ++which) {
      float4* place = reinterpret_cast<float4*>(scores + which * CHUNK * CHUNK + score_place(i, j));
      float4 x = *place;
      x.x = __fmul_rn(x.x, fades[0]), x.y = __fmul_rn(x.y, fades[1]);
      x.z = __fmul_rn(x.z, fades[2]), x.w = __fmul_rn(x.w, fades[3]);
      *place = x;
    }
  }
}

// x times each of y, added to chains.
template <int FOURS>
__device__ inline void add_product(float x, const float4 (&y)[FOURS], float (&total)[4 * FOURS]) {
#pragma unroll
  for (int v = 0; v < 4 * FOURS; ++v) total[v] = __fmaf_rn(x, element(y[v / 4], v % 4), total[v]);
}

// A thread's fours of a row.
template <int FOURS>
__device__ inline void read_fours(const float* from, float4 (&to)[FOURS]) {
#pragma unroll
  for (int f = 0; f < FOURS; ++f) to[f] = read4(from + 16 * f);
}

// Vectors of a thread's tokens times the state, in order of its rows; what the next step needs is read before this one's
// sums.
template <int COLUMNS>
__device__ inline void ask_state(
    float (&sums)[Width<COLUMNS>::ROWS][Width<COLUMNS>::OWN], const float* vectors, const float* state, const Place& place) {
  using W = Width<COLUMNS>;
  const float* const own = vectors + token_of<COLUMNS>(place, 0) * VECTOR;
  const int exchanged = place.row * 4;
  float4 a[W::ROWS], next_a[W::ROWS], b[W::FOURS], next_b[W::FOURS];
  auto read = [&](int k) {
#pragma unroll
    for (int r = 0; r < W::ROWS; ++r) next_a[r] = read4(own + r * (8 * W::ROW_WARPS * VECTOR) + (k ^ exchanged));
  };
  read(0);
  read_fours(state + state_place<COLUMNS>(0, place.column), next_b);
#pragma unroll 1
  for (int eight = 0; eight < KEY_DIM; eight += 8) {
    const float* const rows = state + eight * COLUMNS;
#pragma unroll
    for (int k = 0; k < 8; k += 4) {
      if (KEY_DIM % 8 != 0 && eight + k >= KEY_DIM) break;
#pragma unroll
      for (int r = 0; r < W::ROWS; ++r) a[r] = next_a[r];
      read(eight + k + 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (KEY_DIM % 4 != 0 && eight + k + e >= KEY_DIM) break;
#pragma unroll
        for (int f = 0; f < W::FOURS; ++f) b[f] = next_b[f];
        read_fours(rows + state_place<COLUMNS>(k + e + 1, place.column), next_b);
#pragma unroll
        for (int r = 0; r < W::ROWS; ++r) add_product(element(a[r], e), b, sums[r]);
      }
    }
  }
}

// What the changes say to the queries of a thread's tokens, in order: to each those of the tokens up to itself. For 8 changes
// at once, from the eight number CURRENT on; so the compiler knows of most tokens that they have all or none of them.
// `begin_stage` waits for the next SOLVED, of which there are `stages`.
template <int COLUMNS, int CURRENT = 0, typename BeginStage>
__device__ inline void ask_changes(
    float (&sums)[Width<COLUMNS>::ROWS][Width<COLUMNS>::OWN], const float* scores, const float* changes, const Place& place,
    int stages, const BeginStage& begin_stage) {
  using W = Width<COLUMNS>;
  if constexpr (CURRENT < CHUNK / 8) {
    if (CURRENT % (SOLVED / 8) == 0) {
      if (CURRENT / (SOLVED / 8) >= stages) return;
      begin_stage(CURRENT / (SOLVED / 8));
    }
    const float* const own = scores + token_of<COLUMNS>(place, 0) * CHUNK;
#pragma unroll 1
    for (int four = 0; four < 8; four += 4) {
      const int first = CURRENT * 8 + four;
      float4 change[4][W::FOURS];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int f = 0; f < W::FOURS; ++f)
          change[e][f] = read4(changes + first * COLUMNS + change_place<COLUMNS>(e, place.column + 16 * f));
      }
#pragma unroll
      for (int r = 0; r < W::ROWS; ++r) {
        if ((r + 1) * W::ROW_WARPS <= CURRENT) continue;
        const int eight = r * W::ROW_WARPS + place.warp;
        const float4 factors = read4(own + r * (8 * W::ROW_WARPS * CHUNK) + (first ^ place.row * 4));
        if (r * W::ROW_WARPS > CURRENT || eight > CURRENT) {
#pragma unroll
          for (int e = 0; e < 4; ++e) add_product(element(factors, e), change[e], sums[r]);
        } else if (eight == CURRENT) {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (four + e <= place.row) add_product(element(factors, e), change[e], sums[r]);
        }
      }
    }
    ask_changes<COLUMNS, CURRENT + 1>(sums, scores, changes, place, stages, begin_stage);
  }
}

// Where the scores of tokens from `first` on with keys from `others` on are read, both multiples of SOLVED: so that the
// compiler sees that places differ by constants.
struct SolvedScores {
  const float* rows[2];

  __device__ inline SolvedScores(const float* scores, int first, int others)
      : rows{scores + first * CHUNK + others, scores + first * CHUNK + (others ^ 16)} {}
  __device__ inline float4 read(int r, int four) const { return read4(rows[r / 4 % 2] + r * CHUNK + (four ^ r % 4 * 4)); }
};

// The changes of the tokens from `first` on, in one column, one after the other: `told` is what is said of their keys by
// all before them. Some may be known already. Those up to `end` are kept for the next steps.
template <int COLUMNS, bool KNOWN>
__device__ inline void solve(
    float (&told)[SOLVED], int first, int known, int end, int column, const Chunk& chunk, float* values,
    const float* scores, float* changes, float* record) {
  float given[SOLVED];
  const SolvedScores own(scores, first, first);
#pragma unroll
  for (int r = 0; r < SOLVED; ++r) given[r] = values[(first + r) * COLUMNS + column];
#pragma unroll
  for (int four = 0; four < SOLVED; four += 4) {
    float4 near[SOLVED];
    const float4 betas = read4(chunk.betas + first + four);
#pragma unroll
    for (int r = four + 1; r < SOLVED; ++r) near[r] = own.read(r, four);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int t = four + e;
      told[t] = __fmul_rn(element(betas, e), __fsub_rn(given[t], told[t]));
      if (KNOWN && first + t < known) told[t] = changes[first * COLUMNS + change_place<COLUMNS>(t, column)];
#pragma unroll
      for (int r = t + 1; r < SOLVED; ++r) told[r] = __fmaf_rn(element(near[r], e), told[t], told[r]);
    }
  }
#pragma unroll
  for (int four = 0; four < SOLVED; four += 4) {
    const float4 fades = read4(chunk.fades + first + four);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = four + e;
      changes[first * COLUMNS + change_place<COLUMNS>(r, column)] = told[r];
      values[(first + r) * COLUMNS + column] = __fmul_rn(told[r], element(fades, e));
      if ((!KNOWN || first + r >= known) && first + r < end) record[r * VALUE_DIM] = told[r];
    }
  }
}

// The changes, by the first warps, a column by the same lane of some of these, which take turns: each has the next SOLVED
// tokens that nobody has. What is found until then is told to these, while others find changes. After each SOLVED tokens all
// of the program meet. Loops are short: code that is not in a multiprocessor's cache is what a warp would wait for.
template <int COLUMNS>
__device__ inline void find_changes(
    const Call& call, const Part& part, int head, int first_column, const int64* blocks, const Chunk& chunk, float* values,
    const float* scores, float* changes, int stages) {
  using W = Width<COLUMNS>;
  constexpr int GROUPS = COLUMNS / LANES;
  const int warp = threadIdx.x / LANES, column = warp % GROUPS * LANES + threadIdx.x % LANES;
  const int end = first_column + column < VALUE_DIM ? part.end : 0;
  int own = warp / GROUPS, told_of = 0;  // of SOLVED tokens each
  float told[SOLVED];
  auto begin = [&] {
#pragma unroll
    for (int r = 0; r < SOLVED; ++r) told[r] = changes[own * SOLVED * COLUMNS + change_place<COLUMNS>(r, column)];
  };
  begin();
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    if (own < stages) {
#pragma unroll 1
      for (; told_of < stage; ++told_of) {
        const SolvedScores factors_of(scores, own * SOLVED, told_of * SOLVED);
#pragma unroll  // of fours
        for (int four = 0; four < SOLVED; four += 4) {
          float found[4];
#pragma unroll
          for (int e = 0; e < 4; ++e)
            found[e] = changes[told_of * SOLVED * COLUMNS + change_place<COLUMNS>(four + e, column)];
#pragma unroll
          for (int r = 0; r < SOLVED; ++r) {
            const float4 factors = factors_of.read(r, four);
#pragma unroll
            for (int e = 0; e < 4; ++e) told[r] = __fmaf_rn(element(factors, e), found[e], told[r]);
          }
        }
      }
      if (own == stage) {
        const int first = stage * SOLVED;
        float* record = change_record(call, blocks[first / BLOCK_SIZE], head, first) + first_column + column;
        if (first < part.known)
          solve<COLUMNS, true>(told, first, part.known, end, column, chunk, values, scores, changes, record);
        else
          solve<COLUMNS, false>(told, first, part.known, end, column, chunk, values, scores, changes, record);
        own += W::SOLVERS, told_of = 0;
        if (own < stages) begin();
      }
    }
    __syncthreads();
  }
}

// 4 neighbouring numbers, of which `inside` are there.
__device__ inline void write_numbers(Number* to, int inside, const float* x) {
#if ALIGNED && NUMBER != 0
  if (inside <= 0) return;
  unsigned both[2];
  for (int v = 0; v < 2; ++v) both[v] = two_from_floats(x[2 * v], x[2 * v + 1]);
  *reinterpret_cast<float2*>(to) = make_float2(__uint_as_float(both[0]), __uint_as_float(both[1]));
#else
#pragma unroll
  for (int v = 0; v < 4; ++v)
    if (v < inside) to[v] = from_float(x[v]);
#endif
}

// A run from its first chunk, `part`, on: of COLUMNS columns of a value head.
template <int COLUMNS>
__device__ inline void compute_run(const Call& call, Part part, int table, int head, int first_column, float* shared, Run& run) {
  using W = Width<COLUMNS>;
  float* const scores = shared + W::SCORES_AT;
  float* const state = shared + W::STATE_AT;
  float* const changes = shared + W::CHANGES_AT;
  float* const values = shared + W::VALUES_AT;
  const int thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
  const int key_head = head / HEADS_OF_A_KEY;
  const bool asks = warp >= FIRST_ASKER;
  const Place place = place_of<COLUMNS>(asks ? warp - FIRST_ASKER : warp, lane), of_state = place_of<COLUMNS>(warp, lane);
  auto inside = [&](int column) { return least(most(VALUE_DIM - first_column - column, 0), 4); };  // columns of four

  // A chunk's values, decays and gates are asked for before the last part of the work on the chunk before it.
  const int reader = thread / W::READERS, read_column = thread % W::READERS * 4;
  constexpr int APART = MANY_THREADS / W::READERS;
  FourNumbers value[W::READS];
  Number gate = Number(0);
  float decay = 0.0f;
  auto ask_inputs = [&](const Part& of, const int64* blocks) {
#pragma unroll
    for (int r = 0; r < W::READS; ++r) {
      const int i = reader + r * APART;
      const bool is_new = i >= of.known && i < of.end;
      const int64 row = is_new ? of.row + (i - of.known) : of.row;
      value[r] = read_four(value_of(call, row, head) + first_column + read_column, is_new ? inside(read_column) : 0);
    }
    if (thread < of.end) {
      decay = *decay_record(call, blocks[thread / BLOCK_SIZE], head, thread);
      if (thread >= of.known) gate = beta_gate(call, of.row + (thread - of.known), head);
    }
  };
  auto begin_chunk = [&](Chunk& chunk) {
    if (thread >= CHUNK) return;
    chunk.decays[thread] = decay;
    chunk.betas[thread] = beta_of(call, gate, head);
    chunk.since[thread] = expf(decay);
  };

  int turn = 0;
  bool has_state = part.begin > 0;
  copy_keys(call, part, key_head, run.blocks[0], shared);
  ask_inputs(part, run.blocks[0]);
  if (has_state) {
    const float* source = carried<const float>(call, call.state_places, head, table, part.begin) + first_column;
    for (int i = thread; i < KEY_DIM * COLUMNS; i += MANY_THREADS) {
      const int k = i / COLUMNS, column = i % COLUMNS;
      state[state_place<COLUMNS>(k, column)] = first_column + column < VALUE_DIM ? source[k * VALUE_DIM + column] : 0.0f;
    }
  }
  for (int i = thread; i < part.known * COLUMNS; i += MANY_THREADS) {
    const int j = i / COLUMNS, column = i % COLUMNS;
    const float* source = change_record(call, run.blocks[0][j / BLOCK_SIZE], head, j) + first_column;
    changes[change_place<COLUMNS>(j, column)] = first_column + column < VALUE_DIM ? source[column] : 0.0f;
  }
  begin_chunk(run.chunks[0]);
  wait_for_copies<0>();
  while (true) {
    float* const keys = shared + turn * VECTORS;
    float* const queries = shared + (turn ^ 1) * VECTORS;
    Chunk& chunk = run.chunks[turn];
    __syncthreads();  // Keys, decays and the state are there, and what the chunk before had is free.
    copy_queries(call, part, key_head, queries);
    copy_scores(call, part, key_head, scores);
#pragma unroll
    for (int r = 0; r < W::READS; ++r)
      *reinterpret_cast<float4*>(values + (reader + r * APART) * COLUMNS + read_column) = make_float4(
          to_float(value[r][0]), to_float(value[r][1]), to_float(value[r][2]), to_float(value[r][3]));
    if (thread < CHUNK) chunk.fades[thread] = expf(__fsub_rn(chunk.decays[CHUNK - 1], chunk.decays[thread]));
    // Which rows the next chunk has, where; and whether a state is one of the run's last two, which are kept.
    Part next;
    next.row = part.row + (part.end - part.known);
    next.begin = part.begin + CHUNK;
    next.known = 0;
    const int ahead = thread == CHUNK ? 2 * CHUNK - 1 : thread;
    int its_table = -1, its_position = 0;
    int64 its_block = 0;
    if (part.end == CHUNK && thread <= CHUNK && next.row + ahead < call.rows) {
      its_table = call.tables[next.row + ahead], its_position = call.positions[next.row + ahead];
      const int position = next.begin + thread;
      if (thread < CHUNK && thread % BLOCK_SIZE == 0 && position / BLOCK_SIZE < call.table_stride)
        its_block = block_of(call, table, position);
    }

    float sums[W::ROWS][W::OWN] = {};
    if (asks) {
      wait_for_copies<1>();  // queries, not yet the scores
      sync_some(1, ASKERS * LANES);
    }
    if (has_state) ask_state<COLUMNS>(sums, asks ? queries : keys, state, place);
#pragma unroll
    for (int r = 0; r < W::ROWS; ++r) {
      const int i = token_of<COLUMNS>(place, r);
      const float since = chunk.since[i];
#pragma unroll
      for (int v = 0; v < W::OWN; ++v) sums[r][v] = __fmul_rn(sums[r][v], since);
      if (asks || i < part.known) continue;
#pragma unroll
      for (int f = 0; f < W::FOURS; ++f)
        *reinterpret_cast<float4*>(changes + change_place<COLUMNS>(i, place.column + 16 * f)) =
            make_float4(sums[r][4 * f], sums[r][4 * f + 1], sums[r][4 * f + 2], sums[r][4 * f + 3]);
    }
    wait_for_copies<0>();
    fade_scores(chunk.decays, scores);
    const bool is_there = its_table == table && its_position == next.begin + ahead;
    if (thread == CHUNK) run.is_kept = !is_there;
    if (thread < CHUNK && thread % BLOCK_SIZE == 0) run.blocks[turn ^ 1][thread / BLOCK_SIZE] = its_block;
    next.end = __syncthreads_count(thread < CHUNK && is_there);
    if (next.end > 0) copy_keys(call, next, key_head, run.blocks[turn ^ 1], queries);  // which have been read

    const int stages = (part.end + SOLVED - 1) / SOLVED;
    if (!asks) {
      find_changes<COLUMNS>(
          call, part, head, first_column, run.blocks[turn], chunk, values, scores + CHUNK * CHUNK, changes, stages);
    } else {
      if (!DELTA) {
#pragma unroll
        for (int r = 0; r < W::READS; ++r) {
          const int i = reader + r * APART;
          float* record = nullptr;
          if (i >= part.known && i < part.end)
            record = change_record(call, run.blocks[turn][i / BLOCK_SIZE], head, i) + first_column + read_column;
#pragma unroll
          for (int v = 0; v < 4; ++v) {
            float& value_at = values[i * COLUMNS + read_column + v];
            float& change_at = changes[change_place<COLUMNS>(i, read_column + v)];
            const float change = i < part.known ? change_at : __fmul_rn(chunk.betas[i], value_at);
            change_at = change;
            value_at = __fmul_rn(change, chunk.fades[i]);
            if (record != nullptr && v < inside(read_column)) record[v] = change;
          }
        }
        __syncthreads();
      }
      ask_changes<COLUMNS>(sums, scores, changes, place, stages, [&](int stage) {
        if (DELTA) __syncthreads();
        if (stage + 1 == CHUNK / SOLVED && next.end > 0) ask_inputs(next, run.blocks[turn ^ 1]);
      });
      Number* const first_out =
          call.out + part.first_row() * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + first_column + place.column;
#pragma unroll
      for (int r = 0; r < W::ROWS; ++r) {
        const int i = token_of<COLUMNS>(place, r);
        if (i < part.known || i >= part.end) continue;
        Number* const out = first_out + i * (VALUE_HEADS * VALUE_DIM);
#pragma unroll
        for (int f = 0; f < W::FOURS; ++f) {
          const int exist = inside(place.column + 16 * f);
#if SKIP
          Number given[4];
          read_numbers(value_of(call, part.first_row() + i, head) + first_column + place.column + 16 * f, exist, given);
#pragma unroll
          for (int v = 0; v < 4; ++v) sums[r][4 * f + v] = __fmaf_rn(call.skip[head], to_float(given[v]), sums[r][4 * f + v]);
#endif
          write_numbers(out + 16 * f, exist, &sums[r][4 * f]);
        }
      }
    }
    if (part.end < CHUNK) return;
    if (!asks && next.end > 0) ask_inputs(next, run.blocks[turn ^ 1]);
    // The next state.
    const float left = chunk.since[CHUNK - 1];
    float* target = nullptr;
    if (run.is_kept) target = carried<float>(call, call.state_places, head, table, next.begin) + first_column;
    constexpr int ROWS = 4 * W::KEY_FOURS;
    for (int k = of_state.warp * (8 * ROWS) + of_state.row * 4; k < KEY_DIM; k += W::KEY_WARPS * (8 * ROWS)) {
      float total[ROWS][W::OWN];
      auto row_of = [&](int e) { return k + e / 4 * 32 + e % 4; };
#pragma unroll
      for (int e = 0; e < ROWS; ++e) {
#pragma unroll
        for (int f = 0; f < W::FOURS; ++f) {
          float4 now = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (has_state && row_of(e) < KEY_DIM) now = read4(state + state_place<COLUMNS>(row_of(e), of_state.column + 16 * f));
#pragma unroll
          for (int v = 0; v < 4; ++v) total[e][4 * f + v] = __fmul_rn(element(now, v), left);
        }
      }
      float4 key[W::KEY_FOURS], change[W::FOURS], next_key[W::KEY_FOURS], next_change[W::FOURS];
      auto read = [&](int j, int exchanged) {
#pragma unroll
        for (int f = 0; f < W::KEY_FOURS; ++f) next_key[f] = read4(keys + j * VECTOR + (k ^ exchanged) + 32 * f);
        read_fours(values + j * COLUMNS + of_state.column, next_change);
      };
      read(0, 0);
#pragma unroll 1
      for (int j = 0; j < CHUNK; j += 8) {
#pragma unroll
        for (int one = 0; one < 8; ++one) {
#pragma unroll
          for (int f = 0; f < W::KEY_FOURS; ++f) key[f] = next_key[f];
#pragma unroll
          for (int f = 0; f < W::FOURS; ++f) change[f] = next_change[f];
          read(one < 7 || j + 8 < CHUNK ? j + one + 1 : 0, (one + 1) % 8 * 4);
#pragma unroll
          for (int e = 0; e < ROWS; ++e) add_product(element(key[e / 4], e % 4), change, total[e]);
        }
      }
#pragma unroll
      for (int e = 0; e < ROWS; ++e) {
        if (row_of(e) >= KEY_DIM) continue;
#pragma unroll
        for (int f = 0; f < W::FOURS; ++f) {
          const float4 sum = make_float4(total[e][4 * f], total[e][4 * f + 1], total[e][4 * f + 2], total[e][4 * f + 3]);
          const int column = of_state.column + 16 * f;
          *reinterpret_cast<float4*>(state + state_place<COLUMNS>(row_of(e), column)) = sum;
          if (target == nullptr) continue;
          float* const kept = target + row_of(e) * VALUE_DIM + column;
#if ALIGNED
          if (inside(column) > 0) write4_global(kept, sum.x, sum.y, sum.z, sum.w);
#else
#pragma unroll
          for (int v = 0; v < 4; ++v)
            if (v < inside(column)) kept[v] = element(sum, v);
#endif
        }
      }
    }
    if (next.end == 0) return;
    turn ^= 1;
    begin_chunk(run.chunks[turn]);
    wait_for_copies<0>();
    has_state = true;
    part = next;
  }
}

// Of how many columns programs are, such that the multiprocessors take the least time for all runs of the step.
__device__ inline int columns_of(const Call& call) {
  int64 runs = 0;
  for (int first = 0; first < gridDim.x; first += MANY_THREADS) {
    const int i = first + threadIdx.x;
    runs += __syncthreads_count(i < gridDim.x && call.starts[i + 1] - call.starts[i] > call.limit);
  }
  int best = 0;
  int64 least_cost = 0;
#pragma unroll
  for (int columns = 32; columns <= 128; columns *= 2) {
    if (columns < call.least_columns || columns > call.most_columns) continue;
    const int chunk_cost = columns == 32 ? 13 : columns == 64 ? 20 : 38;  // measured, in µs
    const int64 programs = runs * VALUE_HEADS * ((VALUE_DIM + columns - 1) / columns);
    const int64 cost = (programs + call.multiprocessors - 1) / call.multiprocessors * chunk_cost;
    if (best == 0 || cost < least_cost) best = columns, least_cost = cost;
  }
  return best;
}

// The run that begins with a sequence of the step: some columns of a value head. In the delta rule half of the warps have
// the keys and find the changes, the others have the queries.
extern "C" __global__ void __launch_bounds__(MANY_THREADS, 1) many_tokens(const Call call) {
  begin_kernel();
  constexpr int PARTS = (VALUE_DIM + 31) / 32;
  SHARED_MEMORY(shared);
  __shared__ Run run;
  const int thread = threadIdx.x, head = blockIdx.y / PARTS, index = blockIdx.y % PARTS;
  Part part;
  part.row = call.starts[blockIdx.x];
  if (call.starts[blockIdx.x + 1] <= part.row) return;
  const int table = call.tables[part.row], position = call.positions[part.row];
  if (table < 0 || in_step(call, part.row - 1, table, position - 1)) return;
  if (!in_step(call, part.row + call.limit, table, position + static_cast<int>(call.limit))) return;
  const int columns = columns_of(call);
  if (index * columns >= VALUE_DIM) return;
  part.begin = position / CHUNK * CHUNK;
  part.known = position - part.begin;
  part.end = part.known + __syncthreads_count(
      thread < CHUNK - part.known && in_step(call, part.row + thread, table, position + thread));
  if (thread < BLOCKS && thread * BLOCK_SIZE < part.end)
    run.blocks[0][thread] = block_of(call, table, part.begin + thread * BLOCK_SIZE);
  __syncthreads();
  if (columns == 128)
    compute_run<128>(call, part, table, head, index * columns, shared, run);
  else if (columns == 64)
    compute_run<64>(call, part, table, head, index * columns, shared, run);
  else
    compute_run<32>(call, part, table, head, index * columns, shared, run);
}
