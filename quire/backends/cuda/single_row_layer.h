// From attention's output to the end of a layer, for one row: output product, residual, norm, gate and up, activation and
// down in one launch. Each of PROGRAMS programs computes the same share of every product's outputs, by one group of four
// warps. A fifth warp copies the program's weights, in the order of their use, into a ring of shared memory: it begins before
// the kernel before this one has finished, and goes on while the others wait for a row.
//
// A row that all programs need is handed over in words of 8 bytes: two numbers, and the number of this launch. Whoever needs
// it reads until all words have that number, so neither a barrier nor an order of memory is needed. All programs must run at
// once: the launch is a cooperative one.
//
// Every sum has the order of the kernels for single operations: each output is one chain over the inputs
// (quire/backends/triton/single_row_linear.py), a norm's sum is that of rowwise._rms_norm_kernel.
#pragma once

constexpr int GROUP = 128;                  // threads that compute
constexpr int PARTS = HIDDEN / 256;         // a warp adds the squares of 256 numbers at once
constexpr int OWN_PARTS = (PARTS + 3) / 4;  // of a warp
constexpr int OUTPUT_ROWS = HIDDEN / PROGRAMS, UP_ROWS = 2 * INTERMEDIATE / PROGRAMS;
constexpr int LONGEST = ATTENDED > INTERMEDIATE ? ATTENDED : INTERMEDIATE;
constexpr int AT_ONCE = 8;                  // words of 16 bytes that a thread asks for
constexpr int MOST_TRIES = 1 << 22;         // some seconds, where microseconds are expected: an error is better than to hang

struct Map {
  uint64 words[16];
};

struct Call {
  alignas(64) Map output, up, down;
  const uint4* attended;
  const uint4* residual;
  const uint4* norm;
  uint4* total;    // the residual stream, to which the result is not added yet
  uint32* result;  // of down
  uint32* words;   // the number of the last launch, and behind 16 bytes the rows that are handed over
  float eps;
};

__device__ inline float low_of(uint32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_of(uint32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ inline uint32 add_pairs(uint32 a, uint32 b) {
  uint32 result;
  asm("add.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

__device__ inline uint32 multiply_pairs(uint32 a, uint32 b) {
  uint32 result;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// By the instructions that Triton makes of a division in float32.
__device__ inline float divide(float a, float b) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// x / (1 + exp(-x)), as rowwise.silu.
__device__ inline float silu(float x) {
  float power;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(0.0f - x, __uint_as_float(0x3FB8AA3Bu))));
  return divide(x, 1.0f + power);
}

__device__ inline void sync_group() { sync_some(1, GROUP); }

struct Ring {
  uint32 data, full, empty;  // addresses in shared memory
  int slot = 0;
  uint32 parity = 0;

  __device__ void advance() {
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// How many columns of 64 inputs are copied at once.
template <int ROWS, int INNER>
__device__ constexpr int columns_at_once() {
  int columns = 1;
  while (2 * columns * ROWS * 128 <= SLOT_BYTES && INNER / 64 % (2 * columns) == 0 && columns < 16) columns *= 2;
  return columns;
}

// Row `first` of a matrix is the first one of this program's.
template <int ROWS, int INNER>
__device__ inline void copy_weights(Ring& ring, const Map& map, int first) {
  constexpr int COLUMNS = columns_at_once<ROWS, INNER>();
  static_assert(ROWS % 8 == 0 && COLUMNS * ROWS * 128 <= SLOT_BYTES);
#pragma unroll 1
  for (int column = 0; column < INNER / 64; column += COLUMNS) {
    const uint32 full = ring.full + 8 * ring.slot;
    wait_barrier(ring.empty + 8 * ring.slot, ring.parity ^ 1);
    expect_bytes(full, COLUMNS * ROWS * 128);
    copy_box(ring.data + ring.slot * SLOT_BYTES, &map, full, 0, first, 0, column);
    ring.advance();
  }
}

// For four instructions. The registers lie as these want them: any copy of one would wait for it, and the instructions behind
// that with it.
__device__ inline void read_left(const uint4* own, uint32 (&left)[4][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint4 found = own[4 * step];
    left[step][0] = found.x, left[step][1] = found.y, left[step][2] = found.z, left[step][3] = found.w;
  }
}

// The sums of this program's outputs; all rows of the instruction are the one row, so that a thread has two of 8 outputs, and
// has them twice.
template <int ROWS, int INNER>
__device__ inline void product(Ring& ring, const uint4* row, float (&sums)[ROWS / 2]) {
  constexpr int COLUMNS = columns_at_once<ROWS, INNER>(), WIDTH = width_of(ROWS);
  constexpr int UNROLLED = COLUMNS < 4 ? 4 : COLUMNS;  // four sets of registers: two are read, one waits, one is filled
  static_assert(INNER / 64 % UNROLLED == 0);
  const uint4* own = row + threadIdx.x % 4;
  const bool is_first = threadIdx.x % 32 == 0;
  uint32 left[4][4][4] = {};
  read_left(own, left[0]);
#pragma unroll
  for (int i = 0; i < ROWS / 2; ++i) sums[i] = 0.0f;
  uint32 before = 0, right = 0;
#pragma unroll 1
  for (int column = 0; column < INNER / 64; column += UNROLLED) {
#pragma unroll
    for (int i = 0; i < UNROLLED; ++i) {
      if (i % COLUMNS == 0) {
        right = right_operand(ring.data + ring.slot * SLOT_BYTES);
        wait_barrier(ring.full + 8 * ring.slot, ring.parity);
      }
      begin_products();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int n = 0; n < ROWS; n += WIDTH) {
          multiply<WIDTH>(sums + n / 2, left[i % 4][step], right + (i % COLUMNS * ROWS + n) * 8 + step * 2);
        }
      }
      end_products();
      read_left(own + 16 * (column + i + 1), left[(i + 1) % 4]);  // behind the last: not used
      wait_for_products<1>(left[(i + 3) % 4]);
      if (i % COLUMNS == 0) {  // what was read before has been multiplied
        if (is_first && column + i > 0) arrive(before);
        before = ring.empty + 8 * ring.slot;
      }
      if (i % COLUMNS == COLUMNS - 1) ring.advance();
    }
  }
  wait_for_products<0>(left[3]);
#pragma unroll
  for (int i = 0; i < ROWS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
  if (is_first) arrive(before);
}

// Where numbers 2i and 2i + 1 of a row lie, twice, as the instruction's rows n and n + 8 are both this row: of 16 numbers,
// thread i of four takes 2i, 2i + 1, 2i + 8 and 2i + 9.
__device__ inline void put(void* row, int pair, uint32 numbers) {
  char* const place = static_cast<char*>(row) + pair / 8 * 64 + pair % 4 * 16 + pair / 4 % 2 * 8;
  *reinterpret_cast<uint2*>(place) = make_uint2(numbers, numbers);
}

__device__ inline void put(void* row, int chunk, uint32 a, uint32 b, uint32 c, uint32 d) {
  put(row, 4 * chunk, a);
  put(row, 4 * chunk + 1, b);
  put(row, 4 * chunk + 2, c);
  put(row, 4 * chunk + 3, d);
}

__device__ inline void hand_over(uint32* words, int number, uint32 pair, uint32 launch) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(words + number), "r"(pair), "r"(launch) : "memory");
}

// Four numbers each from COUNT places of a row that is handed over, as soon as they are there.
template <int COUNT, typename Place>
__device__ inline void receive(Place place, uint32 launch, uint2 (&pairs)[COUNT]) {
  for (int tries = 0;; ++tries) {
    uint4 found[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(found[i].x), "=r"(found[i].y), "=r"(found[i].z), "=r"(found[i].w)
                   : "l"(place(i))
                   : "memory");
    }
    bool all = true;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      all = all && found[i].y == launch && found[i].w == launch;
      pairs[i] = make_uint2(found[i].x, found[i].z);
    }
    if (all) return;
    if (tries == MOST_TRIES) __trap();
  }
}

// Adds a row that is handed over to `total`, of which each thread has 8 numbers of every part, and puts the norm into `row`.
__device__ inline void receive_normed(const uint32* words, uint32 launch, const uint4 (&weight)[OWN_PARTS], float eps,
                                      uint32 (&total)[OWN_PARTS][4], float* squares, void* row) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint2 pairs[2 * OWN_PARTS];
  receive(
      [&](int i) {
        const int part = warp + 4 * (i / 2);
        return words + (part < PARTS ? part : 0) * 256 + lane * 8 + i % 2 * 4;
      },
      launch, pairs);
#pragma unroll
  for (int i = 0; i < OWN_PARTS; ++i) {
    const int part = warp + 4 * i;
    if (part >= PARTS) continue;
    total[i][0] = add_pairs(pairs[2 * i].x, total[i][0]);
    total[i][1] = add_pairs(pairs[2 * i].y, total[i][1]);
    total[i][2] = add_pairs(pairs[2 * i + 1].x, total[i][2]);
    total[i][3] = add_pairs(pairs[2 * i + 1].y, total[i][3]);
    float sum = high_of(total[i][0]) * high_of(total[i][0]);
    sum = __fmaf_rn(low_of(total[i][0]), low_of(total[i][0]), sum);
#pragma unroll
    for (int j = 1; j < 4; ++j) {
      sum = __fmaf_rn(low_of(total[i][j]), low_of(total[i][j]), sum);
      sum = __fmaf_rn(high_of(total[i][j]), high_of(total[i][j]), sum);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (lane == 0) squares[part] = sum;
  }
  sync_group();
  constexpr int SUMS = PADDED / 256;
  float sums[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = i < PARTS ? squares[i] : 0.0f;
#pragma unroll
  for (int step = SUMS / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < SUMS / 2; ++i) {
      if (i < step) sums[i] += sums[i + step];
    }
  }
  float factor;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(eps + divide(sums[0], static_cast<float>(HIDDEN))));
#pragma unroll
  for (int i = 0; i < OWN_PARTS; ++i) {
    const int part = warp + 4 * i;
    if (part >= PARTS) continue;
    uint32 normed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) normed[j] = bfloats_of_floats(factor * low_of(total[i][j]), factor * high_of(total[i][j]));
    put(row, part * 32 + lane, multiply_pairs(weight[i].x, normed[0]), multiply_pairs(weight[i].y, normed[1]),
        multiply_pairs(weight[i].z, normed[2]), multiply_pairs(weight[i].w, normed[3]));
  }
  sync_group();
}

// The outputs of a product without more; `store` is called with the number of the first of two, and both.
template <int ROWS, typename Store>
__device__ inline void store_outputs(const float (&sums)[ROWS / 2], Store store) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int group = 0; group < ROWS / 8; ++group) {
    if (group % 4 == warp && lane < 4) {
      store(blockIdx.x * ROWS + group * 8 + lane * 2, bfloats_of_floats(sums[4 * group], sums[4 * group + 1]));
    }
  }
}

__device__ inline void store_total(const Call& call, const uint32 (&total)[OWN_PARTS][4]) {
  if (blockIdx.x != 0) return;
#pragma unroll
  for (int i = 0; i < OWN_PARTS; ++i) {
    const int part = threadIdx.x / 32 + 4 * i;
    if (part < PARTS) {
      call.total[part * 32 + threadIdx.x % 32] = make_uint4(total[i][0], total[i][1], total[i][2], total[i][3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(GROUP + 32, 1) single_row_layer(const __grid_constant__ Call call) {
  extern __shared__ uint4 shared[];
  const uint32 start = shared_address(shared), data = (start + 1023) / 1024 * 1024;
  char* const memory = reinterpret_cast<char*>(shared) + (data - start);
  uint4* const long_row = reinterpret_cast<uint4*>(memory + SLOTS * SLOT_BYTES);
  uint4* const short_row = long_row + LONGEST / 4;  // each number twice
  float* const squares = reinterpret_cast<float*>(short_row + HIDDEN / 4);
  uint32* const number = reinterpret_cast<uint32*>(squares + PADDED / 256);
  Ring ring{data, shared_address(number + 4), shared_address(number + 4) + 8 * SLOTS};
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; ++i) {
      make_barrier(ring.full + 8 * i, 1);
      make_barrier(ring.empty + 8 * i, 4);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= GROUP) {
    if (threadIdx.x == GROUP) {
      copy_weights<OUTPUT_ROWS, ATTENDED>(ring, call.output, blockIdx.x * OUTPUT_ROWS);
      copy_weights<UP_ROWS, HIDDEN>(ring, call.up, blockIdx.x * (UP_ROWS / 2));
      copy_weights<OUTPUT_ROWS, INTERMEDIATE>(ring, call.down, blockIdx.x * OUTPUT_ROWS);
    }
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint4 norm[OWN_PARTS] = {};
#pragma unroll
  for (int i = 0; i < OWN_PARTS; ++i) {
    if (warp + 4 * i < PARTS) norm[i] = __ldg(call.norm + (warp + 4 * i) * 32 + lane);
  }
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  uint32* const attended_words = call.words + 4;
  uint32* const hidden_words = attended_words + HIDDEN;
  if (threadIdx.x == 0) *number = *const_cast<volatile uint32*>(call.words) + 1;
#pragma unroll
  for (int chunk = threadIdx.x; chunk < ATTENDED / 8; chunk += GROUP) {
    const uint4 found = call.attended[chunk];
    put(long_row, chunk, found.x, found.y, found.z, found.w);
  }
  uint32 total[OWN_PARTS][4];
#pragma unroll
  for (int i = 0; i < OWN_PARTS; ++i) {
    if (warp + 4 * i < PARTS) {
      const uint4 found = call.residual[(warp + 4 * i) * 32 + lane];
      total[i][0] = found.x, total[i][1] = found.y, total[i][2] = found.z, total[i][3] = found.w;
    }
  }
  sync_group();
  const uint32 launch = *number;
  {
    float sums[OUTPUT_ROWS / 2];
    product<OUTPUT_ROWS, ATTENDED>(ring, long_row, sums);
    store_outputs<OUTPUT_ROWS>(sums, [&](int i, uint32 pair) { hand_over(attended_words, i, pair, launch); });
  }
  receive_normed(attended_words, launch, norm, call.eps, total, squares, short_row);
  store_total(call, total);
  {
    float sums[UP_ROWS / 2];
    product<UP_ROWS, HIDDEN>(ring, short_row, sums);
    constexpr int GROUPS = UP_ROWS / 16;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      if (group % 4 == warp && lane < 4) {
        const uint32 gate = bfloats_of_floats(sums[4 * group], sums[4 * group + 1]);
        const uint32 up = bfloats_of_floats(sums[4 * (group + GROUPS)], sums[4 * (group + GROUPS) + 1]);
        const uint32 active = bfloats_of_floats(silu(low_of(gate)), silu(high_of(gate)));
        hand_over(hidden_words, blockIdx.x * (UP_ROWS / 2) + group * 8 + lane * 2, multiply_pairs(active, up), launch);
      }
    }
  }
#if PDL  // before, kernels behind this one would take the multiprocessors' time
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  constexpr int WORDS = INTERMEDIATE / 4;
  static_assert(WORDS % GROUP == 0);
  constexpr int EACH = WORDS / GROUP, STEP = EACH < AT_ONCE ? EACH : AT_ONCE;
#pragma unroll
  for (int first = 0; first < EACH; first += STEP) {
    uint2 pairs[STEP];
    const auto word = [&](int i) { return (first + i < EACH ? first + i : EACH - 1) * GROUP + int(threadIdx.x); };
    receive([&](int i) { return hidden_words + 4 * word(i); }, launch, pairs);
#pragma unroll
    for (int i = 0; i < STEP; ++i) {
      if (first + i >= EACH) continue;
      put(long_row, 2 * word(i), pairs[i].x);
      put(long_row, 2 * word(i) + 1, pairs[i].y);
    }
  }
  sync_group();
  // all programs have read it: they gave what this one has
  if (blockIdx.x == 0 && threadIdx.x == 0) *const_cast<volatile uint32*>(call.words) = launch;
  {
    float sums[OUTPUT_ROWS / 2];
    product<OUTPUT_ROWS, INTERMEDIATE>(ring, long_row, sums);
    store_outputs<OUTPUT_ROWS>(sums, [&](int i, uint32 pair) { call.result[i / 2] = pair; });
  }
}
