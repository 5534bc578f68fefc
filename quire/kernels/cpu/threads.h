// Threads and memory. Threads come from the OpenMP runtime that torch already runs on, called through its C
// interface: a pool of our own would fight torch's for the same cores, and no compiler support for OpenMP is needed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace quire {

// Calls body(thread, num_threads) once on each thread.
template <class Body>
inline void parallel(int num_threads, Body& body) {
  if (num_threads <= 1) {
    body(0, 1);
    return;
  }
  GOMP_parallel([](void* data) { (*static_cast<Body*>(data))(omp_get_thread_num(), omp_get_num_threads()); },
                &body, unsigned(num_threads), 0);
}

// Calls body(i) for 0..count, contiguous shares on each thread; on one thread when the work is too small to share.
template <class Body>
inline void parallel_shares(int num_threads, int64_t count, int64_t work_each, Body body) {
  constexpr int64_t WORTH_A_THREAD = 16384;
  int64_t useful = count * work_each / WORTH_A_THREAD;
  if (useful < num_threads) num_threads = useful < 1 ? 1 : int(useful);
  if (count < num_threads) num_threads = int(count);
  auto share = [&](int thread, int threads) {
    const int64_t end = count * (thread + 1) / threads;
    for (int64_t i = count * thread / threads; i < end; ++i) body(i);
  };
  parallel(num_threads, share);
}

// Calls body(task) for 0..count, each thread taking the next one as it gets free.
template <class Body>
inline void parallel_tasks(int num_threads, int64_t count, Body body) {
  std::atomic<int64_t> next{0};
  auto work = [&](int, int) {
    for (int64_t task = next.fetch_add(1); task < count; task = next.fetch_add(1)) body(task);
  };
  parallel(count < num_threads ? int(count) : num_threads, work);
}

// Memory of one thread that is kept between calls and only grows; its contents are whatever was left there.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  template <class T>
  T* get(size_t count) {
    size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, bytes);
      size_ = data_ ? bytes : 0;
      if (!data_) std::abort();
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Asks for large pages: a step reads every weight once, and small pages cost a lookup each 4 KiB.
inline void prefer_large_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t LARGE = 2 << 20;
  uintptr_t begin = (uintptr_t(data) + LARGE - 1) / LARGE * LARGE;
  uintptr_t end = (uintptr_t(data) + uintptr_t(bytes)) / LARGE * LARGE;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace quire
