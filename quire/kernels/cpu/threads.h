// Threads and memory.
//
// The threads are made for cores that others use too. Whoever calls does the work, in small pieces, and those of our
// threads that come in time take pieces from it: one that the system lets wait holds nobody up, unless it is in the
// middle of a piece. (OpenMP's, which torch runs on, all have to come to the end of every call.) While there is nothing
// to do, a thread offers its core to others after some microseconds, and sleeps after some milliseconds.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <signal.h>

namespace quire {

class Threads {
 public:
  static Threads& all() {
    static Threads* threads = new Threads;  // for as long as the process lives: they may be asleep when it ends
    return *threads;
  }

  // Calls work(data) here and on up to num_threads - 1 others, at the same time; returns when all that began are done.
  void run(void (*work)(void*), void* data, int num_threads) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) return work(data);  // somebody else's call keeps them busy
    grow(num_threads - 1);
    work_ = work;
    data_ = data;
    const uint64_t call = (state_.load() / CALL + 1) * CALL;
    state_.store(call | OPEN | uint64_t(num_threads - 1) * PLACE);
    if (sleeping_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    work(data);
    state_.fetch_and(~OPEN);
    for (int turns = 0; state_.load() & BUSY; ++turns) relax(turns);
  }

 private:
  // One word says which call it is, whether it is open, how many may still come, and how many are at work.
  static constexpr uint64_t BUSY = 0xffff, PLACE = 0x10000, PLACES = 0xffff0000, OPEN = uint64_t(1) << 32,
                            CALL = uint64_t(1) << 33;
  static constexpr int SPINS = 2000, YIELDS = 4000;

  static void relax(int turns) {
    if (turns > SPINS) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
  }

  void grow(int wanted) {
    if (num_threads_ >= wanted) return;
    sigset_t every, before;  // signals are for the threads of whoever uses us
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    try {
      for (; num_threads_ < wanted; ++num_threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {  // the system gives us no more: we go on with those there are
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void serve() {
    uint64_t seen = 0;
    for (;;) {
      uint64_t state = wait_for_call(seen);
      while ((state & OPEN) && (state & PLACES)) {
        if (state_.compare_exchange_weak(state, state + 1 - PLACE)) {
          work_(data_);  // theirs until our leave: they wait for it
          state_.fetch_sub(1);
          break;
        }
      }
      seen = state / CALL;
    }
  }

  uint64_t wait_for_call(uint64_t seen) {
    for (int turns = 0; turns < SPINS + YIELDS; ++turns) {
      if (const uint64_t state = state_.load(); state / CALL != seen) return state;
      relax(turns);
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleeping_.fetch_add(1);
    uint64_t state = state_.load();
    for (; state / CALL == seen; state = state_.load()) wake_.wait(lock);
    sleeping_.fetch_sub(1);
    return state;
  }

  std::mutex turn_, sleep_;
  std::condition_variable wake_;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  void (*work_)(void*) = nullptr;
  void* data_ = nullptr;
  int num_threads_ = 0;
};

// Calls body() on this thread and at the same time on those others that come in time, at most num_threads in all. Each
// takes from the work what is left of it.
template <class Body>
inline void parallel(int num_threads, Body& body) {
  if (num_threads <= 1) return body();
  Threads::all().run([](void* data) { (*static_cast<Body*>(data))(); }, &body, num_threads);
}

// Calls body(task) for 0..count, each thread taking the next one as it gets free.
template <class Body>
inline void parallel_tasks(int num_threads, int64_t count, Body body) {
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t task = next.fetch_add(1); task < count; task = next.fetch_add(1)) body(task);
  };
  parallel(count < num_threads ? int(count) : num_threads, work);
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
