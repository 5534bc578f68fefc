// What Hopper has for copies and products that go on beside a program: barriers in shared memory, boxes of a tensor (TMA),
// products of a group of four warps whose right operand lies in shared memory.
#pragma once

using uint32 = unsigned;
using uint64 = unsigned long long;

__device__ inline uint32 shared_address(const void* place) { return static_cast<uint32>(__cvta_generic_to_shared(place)); }

__device__ inline void make_barrier(uint32 barrier, uint32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Barriers that were made are seen by copies, too.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ inline void arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void expect_bytes(uint32 barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the barrier's phase of this parity is complete, perhaps after a while.
__device__ inline bool is_complete(uint32 barrier, uint32 parity) {
  uint32 result;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n"
      "}"
      : "=r"(result)
      : "r"(barrier), "r"(parity)
      : "memory");
  return result;
}

__device__ inline void wait_barrier(uint32 barrier, uint32 parity) {
  while (!is_complete(barrier, parity)) {
  }
}

// Starts to copy a box of a tensor of four dimensions to shared memory; its bytes arrive at the barrier.
__device__ inline void copy_box(uint32 to, const void* map, uint32 barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Before a group's products read registers that ordinary instructions have written.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `pending` groups of products are under way. `left` are registers that products before may still read: named
// here, so that nothing else is put into them before.
#define LEFT_4(i) "+r"(left[i][0]), "+r"(left[i][1]), "+r"(left[i][2]), "+r"(left[i][3])
template <int pending>
__device__ inline void wait_for_products(uint32 (&left)[4][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %16;"
               : LEFT_4(0), LEFT_4(1), LEFT_4(2), LEFT_4(3)
               : "n"(pending)
               : "memory");
}
#undef LEFT_4

// The right operand [outputs, 64 inputs] of 128 bytes a row, as TMA lays it out with a swizzle of 128 bytes: the lower half of
// its description, to which a distance in units of 16 bytes may be added. Equal in all of a warp's threads, and known to be.
__device__ inline uint32 right_operand(uint32 place) { return __shfl_sync(0xFFFFFFFFu, place / 16 | 1u << 16, 0); }

// sums += left [64, 16] x right [16, N].
template <int N>
__device__ inline void multiply(float* sums, const uint32 (&left)[4], uint32 right);

#define SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_8 SUMS_4(0)
#define SUMS_16 SUMS_8, SUMS_4(4)
#define SUMS_24 SUMS_16, SUMS_4(8)
#define SUMS_32 SUMS_24, SUMS_4(12)
#define SUMS_40 SUMS_32, SUMS_4(16)
#define SUMS_48 SUMS_40, SUMS_4(20)
#define SUMS_56 SUMS_48, SUMS_4(24)
#define SUMS_64 SUMS_56, SUMS_4(28)
#define MULTIPLY(N, LIST, A, B, C, D, R)                                                                                     \
  template <>                                                                                                              \
  __device__ inline void multiply<N>(float* sums, const uint32 (&left)[4], uint32 right) {                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, {%" #A ", %" #B ", %" #C ", %" #D   \
                 "}, %" #R ", 1, 1, 1, 0;"                                                                                 \
                 : SUMS_##N                                                                                                \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(uint64(0x40000040) << 32 | right));         \
  }
#define LIST_8 "%0, %1, %2, %3"
#define LIST_16 LIST_8 ", %4, %5, %6, %7"
#define LIST_24 LIST_16 ", %8, %9, %10, %11"
#define LIST_32 LIST_24 ", %12, %13, %14, %15"
#define LIST_40 LIST_32 ", %16, %17, %18, %19"
#define LIST_48 LIST_40 ", %20, %21, %22, %23"
#define LIST_56 LIST_48 ", %24, %25, %26, %27"
#define LIST_64 LIST_56 ", %28, %29, %30, %31"
MULTIPLY(8, LIST_8, 4, 5, 6, 7, 8)
MULTIPLY(16, LIST_16, 8, 9, 10, 11, 12)
MULTIPLY(24, LIST_24, 12, 13, 14, 15, 16)
MULTIPLY(32, LIST_32, 16, 17, 18, 19, 20)
MULTIPLY(40, LIST_40, 20, 21, 22, 23, 24)
MULTIPLY(48, LIST_48, 24, 25, 26, 27, 28)
MULTIPLY(56, LIST_56, 28, 29, 30, 31, 32)
MULTIPLY(64, LIST_64, 32, 33, 34, 35, 36)

// The widest of these instructions that divides so many outputs.
__host__ __device__ constexpr int width_of(int outputs) {
  int width = 8;
  for (int each = 8; each <= 64; each += 8) width = outputs % each == 0 ? each : width;
  return width;
}
