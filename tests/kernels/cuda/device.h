// In the place of quire/backends/cuda/device.h: runs the kernels' source on a CPU, a block at a time. Its threads are fibers
// that change places at barriers, in an order that the test chooses; a barrier that not all reach ends the process.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#define __global__
#define __host__
#define __device__ __attribute__((unused))
#define __launch_bounds__(...)
#define __shared__ static
#define SHARED_MEMORY(name) float* const name = emulation::shared_memory()

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx, blockIdx, gridDim;

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulation {

enum class At { RUNNING, WARP, SOME, BLOCK, END };

struct Copy {
  float* to;
  const float* from;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  At at;
  int barrier, expected;  // if it waits for some
  std::vector<std::vector<Copy>> groups;  // of copies on their way, the last one is still open
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline unsigned current = 0;
inline bool copies_late = false;  // copies arrive when they are waited for; else at once
inline std::function<void()> body;
inline std::vector<float> numbers(1024);
inline std::vector<unsigned> votes(1024);
alignas(16) inline float memory[1 << 16];

inline float* shared_memory() { return memory; }

inline void wait_at(At at) {
  const unsigned self = current;
  fibers[self].at = at;
  swapcontext(&fibers[self].context, &scheduler);
  threadIdx = {self, 0, 0};
}

inline void enter() {
  threadIdx = {current, 0, 0};
  body();
  fibers[current].at = At::END;
  swapcontext(&fibers[current].context, &scheduler);
}

// Whether all of some fibers that have not ended wait there; then they go on.
inline bool release(size_t first, size_t end, At at) {
  bool some = false;
  for (size_t i = first; i < end; ++i) {
    if (fibers[i].at == At::END) continue;
    if (fibers[i].at != at) return false;
    some = true;
  }
  for (size_t i = first; i < end; ++i)
    if (fibers[i].at == at) fibers[i].at = At::RUNNING;
  return some;
}

// Those that wait at one barrier of some threads go on when all of these are there.
inline bool release_some() {
  bool went_on = false;
  for (const Fiber& one : fibers) {
    if (one.at != At::SOME) continue;
    const int barrier = one.barrier, expected = one.expected;
    int there = 0;
    for (const Fiber& other : fibers) there += other.at == At::SOME && other.barrier == barrier;
    if (there != expected) continue;
    for (Fiber& other : fibers)
      if (other.at == At::SOME && other.barrier == barrier) other.at = At::RUNNING;
    went_on = true;
  }
  return went_on;
}

inline void run_block(unsigned threads, std::mt19937& source) {
  if (fibers.size() != threads) fibers = std::vector<Fiber>(threads);
  std::vector<unsigned> order(threads);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    order[i] = i;
    fiber.stack.resize(1 << 17);
    fiber.at = At::RUNNING;
    fiber.groups.assign(1, {});
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  for (float& x : memory) x = std::numeric_limits<float>::quiet_NaN();
  while (true) {
    for (unsigned i = threads - 1; i > 0; --i) std::swap(order[i], order[source() % (i + 1)]);
    bool ran = false, alive = false;
    for (unsigned i : order) {
      if (fibers[i].at != At::RUNNING) continue;
      current = i;
      swapcontext(&scheduler, &fibers[i].context);
      ran = true;
    }
    for (unsigned i = 0; i < threads; ++i) alive |= fibers[i].at != At::END;
    if (!alive) return;
    bool goes_on = release(0, threads, At::BLOCK) | release_some();
    for (unsigned i = 0; i < threads; i += 32) goes_on |= release(i, i + 32 < threads ? i + 32 : threads, At::WARP);
    if (!goes_on && !ran) {
      std::fprintf(stderr, "threads wait for each other in block %u, %u\n", blockIdx.x, blockIdx.y);
      std::abort();
    }
  }
}

template <typename Argument>
void run_grid(void (*kernel)(Argument), const Argument& argument, unsigned x, unsigned y, unsigned threads, unsigned seed) {
  std::mt19937 source(seed);
  copies_late = seed % 2 == 1;
  body = [&] { kernel(argument); };
  gridDim = {x, y, 1};
  std::vector<unsigned> order(size_t(x) * y);
  for (size_t i = 0; i < order.size(); ++i) order[i] = unsigned(i);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[source() % i]);
  for (unsigned i : order) {
    blockIdx = {i % x, i / x, 0};
    run_block(threads, source);
  }
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait_at(emulation::At::BLOCK); }
inline void __syncwarp() { emulation::wait_at(emulation::At::WARP); }

inline void sync_some(int barrier, int threads) {
  emulation::fibers[threadIdx.x].barrier = barrier, emulation::fibers[threadIdx.x].expected = threads;
  emulation::wait_at(emulation::At::SOME);
}

inline int __syncthreads_count(bool predicate) {
  emulation::votes[threadIdx.x] = predicate;
  __syncthreads();
  int count = 0;
  for (size_t i = 0; i < emulation::fibers.size(); ++i)
    if (emulation::fibers[i].at != emulation::At::END) count += int(emulation::votes[i]);
  __syncthreads();
  return count;
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
  emulation::votes[threadIdx.x] = predicate;
  __syncwarp();
  unsigned result = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned i = threadIdx.x / 32 * 32 + lane;
    if (emulation::fibers[i].at != emulation::At::END) result |= emulation::votes[i] << lane;
  }
  __syncwarp();
  return result;
}

template <typename T>
inline T __shfl_sync(unsigned, T x, unsigned lane) {
  static_assert(sizeof(T) == sizeof(float));
  std::memcpy(&emulation::numbers[threadIdx.x], &x, sizeof x);
  __syncwarp();
  std::memcpy(&x, &emulation::numbers[threadIdx.x / 32 * 32 + lane], sizeof x);
  __syncwarp();
  return x;
}

inline float __shfl_xor_sync(unsigned mask, float x, unsigned apart) {
  return __shfl_sync(mask, x, threadIdx.x % 32 ^ apart);
}

inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

using half_bits = unsigned short;
inline float float_of_half(half_bits bits) {
  _Float16 x;
  std::memcpy(&x, &bits, sizeof x);
  return float(x);
}
inline half_bits half_of_float(float x) {
  const _Float16 rounded = _Float16(x);
  half_bits bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  return bits;
}
inline unsigned bfloats_of_floats(float low, float high) {
  unsigned result = 0;
  for (const float x : {high, low}) {
    const unsigned bits = __float_as_uint(x);
    result = result << 16 | (std::isnan(x) ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
  return result;
}
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }
inline void let_next_start() {}
inline void wait_for_previous() {}
inline void begin_kernel() {}
template <typename T>
inline T* in_global_memory(T* place) {
  return place;
}

inline void copy16_async(float* to, const float* from) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) {
    std::fprintf(stderr, "a copy of 16 bytes is not aligned\n");
    std::abort();
  }
  if (emulation::copies_late)
    emulation::fibers[threadIdx.x].groups.back().push_back({to, from});
  else
    std::memcpy(to, from, 16);
}

inline void write4_global(float* to, float x, float y, float z, float w) {
  if (reinterpret_cast<uintptr_t>(to) % 16) {
    std::fprintf(stderr, "a store of 16 bytes is not aligned\n");
    std::abort();
  }
  to[0] = x, to[1] = y, to[2] = z, to[3] = w;
}

inline void end_copies() { emulation::fibers[threadIdx.x].groups.emplace_back(); }

template <int pending>
inline void wait_for_copies() {
  auto& groups = emulation::fibers[threadIdx.x].groups;
  while (groups.size() > size_t(pending) + 1) {
    for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
    groups.erase(groups.begin());
  }
}
