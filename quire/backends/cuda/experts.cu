// Products of experts that have many rows each, for Hopper: see experts.py for what they are and who takes them.
//
// A cluster, of two neighbouring blocks or of one, takes one item after the other from a counter: WIDTH pairs of an expert times
// 256 rows of its weight. Each of two blocks has every other 64 of these pairs, and copies half of the weights into the memory of
// both: so the L2 cache, whose bytes a second decide, gives each block 32 KB for a turn of 128 x 256 x 64 instead of 48.
// In a block two groups of four warps multiply 64 rows each; a group whose rows do not exist leaves the tensor core to the other.
// Four more warps copy, as far ahead as there is room, also for the next item: two of them rows of x, by the list of pairs, 16
// bytes a lane; one lane has weights copied by the tensor memory accelerator.
//
// A block waits for its own cluster only, whose blocks the device starts together or not at all. So any number of clusters may
// run at a time, and a kernel beside this one that leaves room for a few makes it slow, but can't make it wait for ever.
//
// The inner dimension is walked in order with one accumulator, as in quire/backends/triton/tile_product.py.
//
// Constants: CLUSTER, blocks of a cluster; GROUPS of a block; STAGES, turns that are copied ahead; CALL_BYTES and SHARED_BYTES, what
// it is given; NUMBER, 1 for float16 and 2 for bfloat16; PDL, whether it begins before the kernel before it ends.

namespace {

constexpr int CHUNK = 64;  // rows of a group, and numbers of a row that are copied at a time: 128 bytes, swizzled
constexpr int WIDTH = CLUSTER * GROUPS * CHUNK;
constexpr int OUTPUTS = 256;
constexpr int HALF = OUTPUTS / 2;  // rows of a box of weights; outputs that are stored at a time
constexpr int COPYING_WARPS = 4;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int COPYING_REGISTERS = 56;
constexpr int MULTIPLYING_REGISTERS = 224;
constexpr int ROW_BYTES = CHUNK * CHUNK * 2, WEIGHT_BYTES = OUTPUTS * CHUNK * 2, STAGED_BYTES = 16 * HALF * 2;
constexpr int ITEMS = 4;  // that are known ahead
constexpr int SWIZZLED = 1024;  // bytes after which the swizzled layout repeats

// What the tensor memory accelerator wants to know of a tensor.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

struct Call {
  TensorMap weight;   // [experts * outputs, inner] by boxes of HALF rows
  const char* x;      // rows of `inner` numbers
  const int* experts; // of each tile; see quire/backends/triton/grouping.py
  const int* counts;
  const int* order;
  int* taken;         // items beyond each block's first, and blocks that are done; both 0 before and after
  char* out;          // [pairs, outer]
  long long row_bytes;
  int bound, inner, outer, pairs_of_row;
};

static_assert(sizeof(Call) == CALL_BYTES, "as in experts.py");

struct Item {
  int tile, block, count, expert;  // tile -1: no more
};

__device__ inline unsigned shared_address(const void* place) { return static_cast<unsigned>(__cvta_generic_to_shared(place)); }

__device__ inline void init_barrier(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ inline unsigned rank() {
  unsigned found;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(found));
  return found;
}

// The same place in the memory of another block of the cluster.
__device__ inline unsigned in_block(unsigned place, unsigned block) {
  unsigned found;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(found) : "r"(place), "r"(block));
  return found;
}

// At a barrier of a block of the cluster, by its address there.
__device__ inline void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// All threads of the cluster.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ inline void arrive_and_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives when all copies that this thread has begun are there.
__device__ inline void arrive_with_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void wait(unsigned barrier, int phase) {
  asm volatile(
      "{\n"
      ".reg .pred opened;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 opened, [%0], %1;\n"
      "@opened bra done;\n"
      "bra again;\n"
      "done:\n"
      "}" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ inline void copy16(unsigned to, const char* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// To the same place in all blocks of the cluster; arrives at the same barrier in each.
__device__ inline void copy_box(unsigned to, const TensorMap* map, int column, int row, unsigned barrier) {
#if CLUSTER == 1
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier),
      "h"(static_cast<unsigned short>((1 << CLUSTER) - 1)) : "memory");
#endif
}

// What a product reads: rows of 64 numbers, swizzled, eights of them one after the other.
__device__ inline unsigned long long described(unsigned place) {
  return 0x4000004000010000ull | ((place >> 4) & 0x3fff);
}

#if NUMBER == 2
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
#else
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
#endif

// sums += rows x weights, 64 x 256 x 16; without `adds`, sums = rows x weights.
__device__ inline void multiply(float (&sums)[128], unsigned long long rows, unsigned long long weights, int adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n" PRODUCT
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, adds, 1, 1, 0, 0;\n}\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
        "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]),
        "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
        "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]),
        "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
        "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]),
        "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]),
        "+f"(sums[64]), "+f"(sums[65]), "+f"(sums[66]), "+f"(sums[67]), "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]),
        "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]), "+f"(sums[76]), "+f"(sums[77]), "+f"(sums[78]), "+f"(sums[79]),
        "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]), "+f"(sums[84]), "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]),
        "+f"(sums[88]), "+f"(sums[89]), "+f"(sums[90]), "+f"(sums[91]), "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]), "+f"(sums[95]),
        "+f"(sums[96]), "+f"(sums[97]), "+f"(sums[98]), "+f"(sums[99]), "+f"(sums[100]), "+f"(sums[101]), "+f"(sums[102]), "+f"(sums[103]),
        "+f"(sums[104]), "+f"(sums[105]), "+f"(sums[106]), "+f"(sums[107]), "+f"(sums[108]), "+f"(sums[109]), "+f"(sums[110]), "+f"(sums[111]),
        "+f"(sums[112]), "+f"(sums[113]), "+f"(sums[114]), "+f"(sums[115]), "+f"(sums[116]), "+f"(sums[117]), "+f"(sums[118]), "+f"(sums[119]),
        "+f"(sums[120]), "+f"(sums[121]), "+f"(sums[122]), "+f"(sums[123]), "+f"(sums[124]), "+f"(sums[125]), "+f"(sums[126]), "+f"(sums[127])
      : "l"(rows), "l"(weights), "r"(adds));
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int pending>
__device__ inline void wait_for_products(float (&sums)[128]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
  if (pending == 0) {
#pragma unroll
    for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(sums[i])::"memory");
  }
}

// Two numbers rounded to NUMBER's format, the first one in the low half.
__device__ inline unsigned rounded(float low, float high) {
  unsigned result;
#if NUMBER == 2
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
#endif
  return result;
}

__device__ inline float low_of(unsigned two) {
#if NUMBER == 2
  return __uint_as_float(two << 16);
#else
  return float_of_half(static_cast<half_bits>(two));
#endif
}

__device__ inline float high_of(unsigned two) {
#if NUMBER == 2
  return __uint_as_float(two & 0xffff0000u);
#else
  return float_of_half(static_cast<half_bits>(two >> 16));
#endif
}

// x * sigmoid(x), by the same instructions as `rowwise.silu`.
__device__ inline float silu(float x) {
  float power, result;
  const float scaled = (0.0f - x) * 1.44269502f;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(scaled));
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(power + 1.0f));
  return result;
}

// `rowwise.gated` of two pairs of numbers.
__device__ inline unsigned gated(float gate0, float gate1, float up0, float up1) {
  const unsigned gates = rounded(gate0, gate1), ups = rounded(up0, up1);
  const unsigned activated = rounded(silu(low_of(gates)), silu(high_of(gates)));
  return rounded(low_of(activated) * low_of(ups), high_of(activated) * high_of(ups));
}

constexpr int BARRIERS = 2 * STAGES + 2 * ITEMS;
static_assert(SWIZZLED + STAGES * (GROUPS * ROW_BYTES + WEIGHT_BYTES) + GROUPS * 4 * STAGED_BYTES + ITEMS * sizeof(Item) + 8 * BARRIERS <=
                  SHARED_BYTES,
              "as in experts.py");

struct Memory {  // addresses of shared memory; the last four of barriers
  unsigned rows, weights, staged, items, full, empty, known, free;
};

__device__ inline Item item_in(const Memory& memory, int slot) {
  Item item;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(item.tile), "=r"(item.block), "=r"(item.count), "=r"(item.expert)
               : "r"(memory.items + 16 * slot)
               : "memory");
  return item;
}

// Item `number` of this cluster, which the first block's copying lane has sent; for a warp.
__device__ inline Item item_of(const Memory& memory, int number) {
  const int slot = number % ITEMS;
  wait(memory.known + 8 * slot, number / ITEMS & 1);
  const Item item = item_in(memory, slot);
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(in_block(memory.free + 8 * slot, 0));
  return item;
}

// The first outputs of an item's weights.
template <bool is_gated>
__device__ inline int first_output(const Item& item) { return item.block * (is_gated ? HALF : OUTPUTS); }

__device__ inline Item read_item(const Call& call, int number, int blocks, int num_items) {
  if (number >= num_items) return {-1, 0, 0, 0};
  const int tile = number / blocks;
  return {tile, number - tile * blocks, call.counts[tile], call.experts[tile]};
}

__device__ inline void send_item(const Memory& memory, int number, const Item& item) {
  const int slot = number % ITEMS;
  wait(memory.free + 8 * slot, (number / ITEMS & 1) ^ 1);
  arrive_and_expect(memory.known + 8 * slot, sizeof(Item));
  for (int block = 0; block < CLUSTER; ++block) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     in_block(memory.items + 16 * slot, block)),
                 "r"(item.tile), "r"(item.block), "r"(item.count), "r"(item.expert), "r"(in_block(memory.known + 8 * slot, block))
                 : "memory");
  }
}

// Item `number`, for the copying lane of another block than the first, which expects a later one in its place.
__device__ inline Item receive_item(const Memory& memory, int number) {
  const int slot = number % ITEMS;
  wait(memory.known + 8 * slot, number / ITEMS & 1);
  const Item item = item_in(memory, slot);
  arrive_and_expect(memory.known + 8 * slot, sizeof(Item));
  arrive(in_block(memory.free + 8 * slot, 0));
  return item;
}

// One lane of each block: copies its part of the weights. That of the first block also finds items, three ahead.
template <bool is_gated>
__device__ inline void copy_weights(const Call& call, const Memory& memory) {
  const int blocks = call.outer / (is_gated ? HALF : OUTPUTS), num_items = call.counts[call.bound] * blocks;
  const int first = blockIdx.x / CLUSTER, programs = gridDim.x / CLUSTER, turns = call.inner / CHUNK;
  const int rows = is_gated ? 2 * call.outer : call.outer, apart = is_gated ? call.outer : HALF;
  const unsigned own = rank();
  Item item, next;
  int after;
  if (own == 0) {
    item = read_item(call, first, blocks, num_items);
    send_item(memory, 0, item);
    next = read_item(call, programs + atomicAdd(call.taken, 1), blocks, num_items);
    after = programs + atomicAdd(call.taken, 1);
  } else {
    for (int i = 0; i < ITEMS; ++i) arrive_and_expect(memory.known + 8 * i, sizeof(Item));
    item = receive_item(memory, 0);
  }
  int stage = 0, phase = 1;
  for (int number = 1; item.tile >= 0; ++number) {
    Item later;
    if (own == 0) {
      send_item(memory, number, next);
      later = read_item(call, after, blocks, num_items);
      after = programs + atomicAdd(call.taken, 1);
    }
    const int row = item.expert * rows + first_output<is_gated>(item);
    for (int turn = 0; turn < turns; ++turn) {
      wait(memory.empty + 8 * stage, phase);
      const unsigned barrier = memory.full + 8 * stage, place = memory.weights + WEIGHT_BYTES * stage;
      arrive_and_expect(barrier, WEIGHT_BYTES);
      if (CLUSTER == 1 || own == 0) copy_box(place, &call.weight, turn * CHUNK, row, barrier);
      if (CLUSTER == 1 || own == 1) copy_box(place + WEIGHT_BYTES / 2, &call.weight, turn * CHUNK, row + apart, barrier);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    if (own == 0) {
      item = next;
      next = later;
    } else {
      item = receive_item(memory, number);
    }
  }
  if (own > 0) return;
  __threadfence();
  if (atomicAdd(call.taken + 1, 1) == programs - 1) call.taken[0] = call.taken[1] = 0;
}

// One warp: copies the rows of a group, chunk `chunk` of an item. A lane has 16 bytes of every fourth row.
__device__ inline void copy_rows(const Call& call, const Memory& memory, int group, int chunk) {
  const int lane = threadIdx.x % 32, turns = call.inner / CHUNK;
  const char* const source = call.x + lane % 8 * 16;
  const unsigned target = memory.rows + group * ROW_BYTES + lane / 8 * 128;
  const unsigned even = target + ((lane % 8 ^ lane / 8) * 16), odd = target + 512 + ((lane % 8 ^ (lane / 8 + 4)) * 16);
  const unsigned row_units = static_cast<unsigned>(call.row_bytes / 16);
  int stage = 0, phase = 1;
  Item item = item_of(memory, 0);
  int first = 0, second = 0;  // pairs: of row `lane`, and of row 32 + lane
  const auto read_pairs = [&] {
    const int* const pairs = call.order + static_cast<long long>(item.tile) * WIDTH + chunk * CHUNK + lane;
    const int left = item.tile < 0 ? 0 : item.count - chunk * CHUNK - lane;
    first = left > 0 ? pairs[0] : 0;
    second = left > 32 ? pairs[32] : 0;
  };
  read_pairs();
  for (int number = 1; item.tile >= 0; ++number) {
    const int count = item.count - chunk * CHUNK;
    unsigned places[16];  // of 16 bytes
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int pair = __shfl_sync(~0u, i < 8 ? first : second, lane / 8 + 4 * (i % 8));
      places[i] = static_cast<unsigned>(pair / call.pairs_of_row) * row_units;
    }
    const int own = count - lane / 8;  // row 4 * i is there if this is more
    item = item_of(memory, number);
    read_pairs();
    for (int turn = 0; turn < turns; ++turn) {
      wait(memory.empty + 8 * stage, phase);
      const char* const from = source + turn * (2 * CHUNK);
      const unsigned shift = stage * (GROUPS * ROW_BYTES);
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (4 * i < own) copy16((i % 2 ? odd : even) + shift + i / 2 * 1024, from + 16ull * places[i]);
      arrive_with_copies(memory.full + 8 * stage);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
  }
}

// Stores 16 rows of 128 outputs that a warp has, 16 bytes a lane. `numbers`: [i][0] of row lane / 4, [i][1] of the eighth row
// after it, two outputs each.
__device__ inline void store_half(const unsigned (&numbers)[16][2], unsigned staged, char* out, long long row_bytes, int pair,
                                  int count) {
  const int lane = threadIdx.x % 32;
  const int row = lane % 16;
  __syncwarp();  // what lay there was read
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const unsigned place = staged + row * (2 * HALF) + (((i + lane / 16) ^ row % 8) * 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(numbers[i][0]),
                 "r"(numbers[i][1]), "r"(numbers[i + 1][0]), "r"(numbers[i + 1][1]) : "memory");
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int own = 2 * i + lane / 16;
    const unsigned place = staged + own * (2 * HALF) + ((lane % 16 ^ own % 8) * 16);
    int4 found;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "r"(place) : "memory");
    const long long target = __shfl_sync(~0u, pair, own);
    if (own < count) *reinterpret_cast<int4*>(out + target * row_bytes + lane % 16 * 16) = found;
  }
}

// A group of four warps: multiplies its 64 rows of each item, chunk `chunk`, and stores the outputs.
template <bool is_gated>
__device__ inline void multiply_rows(const Call& call, const Memory& memory, int group, int chunk) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, turns = call.inner / CHUNK;
  const unsigned staged = memory.staged + (group * 4 + warp) * STAGED_BYTES;
  const unsigned empty = in_block(memory.empty, lane % CLUSTER);
  const long long row_bytes = 2ll * call.outer;
  int stage = 0, phase = 0;
  for (int number = 0;; ++number) {
    const Item item = item_of(memory, number);
    if (item.tile < 0) break;
    if (item.count <= chunk * CHUNK) {
      for (int turn = 0; turn < turns; ++turn) {
        wait(memory.full + 8 * stage, phase);
        if (lane < CLUSTER) arrive(empty + 8 * stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      continue;
    }
    const int first_row = chunk * CHUNK + warp * 16, count = item.count - first_row;
    int pair = 0;
    if (lane < min(count, 16)) pair = call.order[static_cast<long long>(item.tile) * WIDTH + first_row + lane];
    float sums[128];
    int last = 0;
    for (int turn = 0; turn < turns; ++turn) {
      wait(memory.full + 8 * stage, phase);
      // Products read through another proxy than that of threads, which copied the rows.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      const unsigned long long rows = described(memory.rows + (stage * GROUPS + group) * ROW_BYTES);
      const unsigned long long weights = described(memory.weights + stage * WEIGHT_BYTES);
      begin_products();
#pragma unroll
      for (int i = 0; i < CHUNK / 16; ++i) multiply(sums, rows + 2 * i, weights + 2 * i, turn + i);
      end_products();
      wait_for_products<1>(sums);
      if (turn > 0 && lane < CLUSTER) arrive(empty + 8 * last);
      last = stage;
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    wait_for_products<0>(sums);
    if (lane < CLUSTER) arrive(empty + 8 * last);
    char* const out = call.out + first_output<is_gated>(item) * 2;
    unsigned numbers[16][2];
#pragma unroll
    for (int half = 0; half < (is_gated ? 1 : 2); ++half) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float* const own = sums + 64 * half + 4 * i + 2 * side;
          numbers[i][side] = is_gated ? gated(own[0], own[1], own[64], own[65]) : rounded(own[0], own[1]);
        }
      }
      store_half(numbers, staged, out + half * (2 * HALF), row_bytes, pair, count);
    }
  }
}

template <bool is_gated>
__device__ inline void compute_products(const Call& call) {
  extern __shared__ char dynamic[];
  const unsigned begin = (shared_address(dynamic) + SWIZZLED - 1) / SWIZZLED * SWIZZLED;
  Memory memory;
  memory.rows = begin;
  memory.weights = memory.rows + STAGES * GROUPS * ROW_BYTES;
  memory.staged = memory.weights + STAGES * WEIGHT_BYTES;
  memory.items = memory.staged + GROUPS * 4 * STAGED_BYTES;
  memory.full = memory.items + ITEMS * 16;
  memory.empty = memory.full + STAGES * 8;
  memory.known = memory.empty + STAGES * 8;
  memory.free = memory.known + ITEMS * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      init_barrier(memory.full + 8 * i, GROUPS * 32 + 1);
      init_barrier(memory.empty + 8 * i, CLUSTER * GROUPS * 4);
    }
    for (int i = 0; i < ITEMS; ++i) {
      init_barrier(memory.known + 8 * i, 1);
      init_barrier(memory.free + 8 * i, CLUSTER * GROUPS * 5 + CLUSTER - 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  sync_cluster();
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  if (group == GROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING_REGISTERS));
    if (warp < GROUPS) {
      copy_rows(call, memory, warp, warp * CLUSTER + rank());
    } else if (warp == COPYING_WARPS - 1 && threadIdx.x % 32 == 0) {
      copy_weights<is_gated>(call, memory);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING_REGISTERS));
    multiply_rows<is_gated>(call, memory, group, group * CLUSTER + rank());
  }
  __syncwarp();
  sync_cluster();  // the other block may still arrive at this one's barriers
}

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    gated_product(const __grid_constant__ Call call) {
  compute_products<true>(call);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    plain_product(const __grid_constant__ Call call) {
  compute_products<false>(call);
}
