// Threads and memory.
//
// The threads are made for cores that others use too. Whoever calls does the work, in small pieces, and those of our
// threads that come in time take pieces from it: one that the system lets wait holds nobody up, unless it is in the
// middle of a piece. (OpenMP's, which torch runs on, all have to come to the end of every call.) While there is nothing
// to do, a thread offers its core to others after some microseconds, and sleeps if one takes it, or after some
// milliseconds. And if they are of no help, since those who took pieces had to wait with them, the caller works alone
// for a while.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quire {

// Calls work(data) here and on up to num_threads - 1 others, at the same time; returns when all that began are done.
// `mine` and `all`, if given, count the pieces that were done here, and all: then it is known what the others were good
// for.
void run_together(void (*work)(void*), void* data, int num_threads, const int64_t* mine, int64_t all);

// Calls body() on this thread and at the same time on those others that come in time, at most num_threads in all. Each
// takes from the work what is left of it.
template <class Body>
inline void parallel(int num_threads, Body& body, const int64_t* mine = nullptr, int64_t all = 0) {
  if (num_threads <= 1) return body();
  run_together([](void* data) { (*static_cast<Body*>(data))(); }, &body, num_threads, mine, all);
}

// Calls body(task) for 0..count. Each thread has a run of neighbours, whose memory lies in one piece, and takes one after
// the other; then those that are left of the others' runs.
template <class Body>
inline void parallel_tasks(int num_threads, int64_t count, Body body) {
  struct alignas(64) Run {
    std::atomic<int64_t> next;
    int64_t end;
  };
  constexpr int64_t MOST = 64;
  num_threads = int(std::min<int64_t>(count, num_threads));
  const int num_runs = int(std::min<int64_t>(num_threads, MOST));
  Run runs[MOST];
  for (int i = 0; i < num_runs; ++i) {
    runs[i].next.store(count * i / num_runs, std::memory_order_relaxed);
    runs[i].end = count * (i + 1) / num_runs;
  }
  std::atomic<int> arrived{1};  // the caller has the first run
  int64_t mine = 0;
  const pthread_t caller = pthread_self();
  auto work = [&] {
    const bool is_caller = pthread_equal(pthread_self(), caller);
    const int first = is_caller ? 0 : arrived.fetch_add(1);
    int64_t done = 0;
    for (int i = 0; i < num_runs; ++i) {
      Run& run = runs[(first + i) % num_runs];
      for (int64_t task = run.next.fetch_add(1); task < run.end; task = run.next.fetch_add(1), ++done) body(task);
    }
    if (is_caller) mine = done;
  };
  parallel(num_threads, work, &mine, count);
}

// Calls body(i) for 0..count, where each is little work: threads take several at a time, and as many threads take part
// as there is work for.
template <class Body>
inline void parallel_shares(int num_threads, int64_t count, int64_t work_each, Body body) {
  constexpr int64_t WORTH_A_THREAD = 16384, SHARES = 4;
  const int64_t useful = std::max<int64_t>(1, std::min<int64_t>(count, count * work_each / WORTH_A_THREAD));
  if (useful < num_threads) num_threads = int(useful);
  const int64_t shares = num_threads == 1 ? 1 : std::min(count, num_threads * SHARES);
  parallel_tasks(num_threads, shares, [&](int64_t share) {
    const int64_t end = count * (share + 1) / shares;
    for (int64_t i = count * share / shares; i < end; ++i) body(i);
  });
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
