// What the kernels need of the device beyond C++: put before each source by the compiler's options. Tests put another file
// in its place, which has the same names, and so run the same kernels on a CPU.
#pragma once

#define SHARED_MEMORY(name) extern __shared__ float4 name##_[]; float* const name = reinterpret_cast<float*>(name##_)

using half_bits = unsigned short;

__device__ inline float float_of_half(half_bits x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x));
  return result;
}

__device__ inline half_bits half_of_float(float x) {
  half_bits result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
}

// Two numbers in bfloat16, rounded to the nearest, the first one in the low half; what is not a number is 0x7fff.
__device__ inline unsigned bfloats_of_floats(float low, float high) {
  unsigned result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

__device__ inline float inverse_root(float x) { return rsqrtf(x); }

// Tells the compiler that an address made of a number lies in global memory.
template <typename T>
__device__ inline T* in_global_memory(T* place) {
  __builtin_assume(__isGlobal(place));
  return place;
}

// Programmatic dependent launch: see quire/backends/triton/launch.py.
__device__ inline void let_next_start() {
#if PDL
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void wait_for_previous() {
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void begin_kernel() {
  let_next_start();
  wait_for_previous();
}

// 16 bytes from global to shared memory, on their way while the thread goes on.
__device__ inline void copy16_async(float* to, const float* from) {
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from) : "memory");
}

// 16 bytes to global memory at once, which the compiler divides into four stores where it does not see that they are aligned.
__device__ inline void write4_global(float* to, float x, float y, float z, float w) {
  const size_t target = __cvta_generic_to_global(to);
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// Ends a group of copies.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `pending` of this thread's groups are on their way.
template <int pending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// A barrier of `threads` threads, whole warps of a block; 0 is that of all.
__device__ inline void sync_some(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
