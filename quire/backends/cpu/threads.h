// Threads and memory.
//
// The threads are made for cores that others use too. Whoever calls does the work, in small pieces, and those of our
// threads that come in time take pieces from it: one that the system lets wait holds nobody up, unless it is in the
// middle of a piece. (OpenMP's, which torch runs on, all have to come to the end of every call.) While there is nothing
// to do, a thread offers its core to others after some microseconds, and sleeps if one takes it, or after some
// milliseconds. And if they are of no help, since those who took pieces had to wait with them, the caller works alone
// for a while.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
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
#include <pthread.h>
#include <signal.h>

namespace quire {

using Clock = std::chrono::steady_clock;
inline double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

class Threads {
 public:
  // For as long as the process lives: they may be asleep when it ends. A fork, which has not got them, makes its own.
  static Threads& all() {
    auto renew = [] { instance_ = new Threads; };
    static const int watched = (renew(), pthread_atfork(nullptr, nullptr, renew));
    (void)watched;
    return *instance_;
  }

  // Calls work(data) here and on up to num_threads - 1 others, at the same time; returns when all that began are done.
  // `mine` and `all`, if given, count the pieces that were done here, and all: then it is known what the others were
  // good for.
  void run(void (*work)(void*), void* data, int num_threads, const int64_t* mine = nullptr, int64_t all = 0) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) return work(data);  // somebody else's call keeps them busy
    const Clock::time_point began = Clock::now();
    if (began < alone_until_) return work(data);
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
    const Clock::time_point done = Clock::now();
    for (int turns = 0; state_.load() & BUSY; ++turns) relax(turns);
    if (mine) judge(seconds(done - began) * double(all) / double(std::max<int64_t>(*mine, 1)), began, Clock::now());
  }

 private:
  // One word says which call it is, whether it is open, how many may still come, and how many are at work.
  static constexpr uint64_t BUSY = 0xffff, PLACE = 0x10000, PLACES = 0xffff0000, OPEN = uint64_t(1) << 32,
                            CALL = uint64_t(1) << 33;
  static constexpr int SPINS = 2000, YIELDS = 4000, WINDOW = 64;
  static constexpr double TAKEN = 100e-6, SHORTEST = 0.05, LONGEST = 2.0;

  // Adds up what calls took, and what they would have taken alone by the pace of the caller's own pieces.
  void judge(double alone, Clock::time_point began, Clock::time_point ended) {
    alone_ += alone;
    together_ += seconds(ended - began);
    if (++num_judged_ < WINDOW) return;
    if (together_ > 0.9 * alone_) {
      alone_until_ = ended + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(pause_));
      pause_ = std::min(2 * pause_, LONGEST);
    } else {
      pause_ = SHORTEST;
    }
    num_judged_ = 0;
    alone_ = together_ = 0;
  }

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
      const Clock::time_point before = turns > SPINS ? Clock::now() : Clock::time_point();
      relax(turns);
      if (turns > SPINS && seconds(Clock::now() - before) > TAKEN) break;
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleeping_.fetch_add(1);
    uint64_t state = state_.load();
    for (; state / CALL == seen; state = state_.load()) wake_.wait(lock);
    sleeping_.fetch_sub(1);
    return state;
  }

  static inline Threads* instance_ = nullptr;
  std::mutex turn_, sleep_;
  std::condition_variable wake_;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  void (*work_)(void*) = nullptr;
  void* data_ = nullptr;
  int num_threads_ = 0, num_judged_ = 0;
  double alone_ = 0, together_ = 0, pause_ = SHORTEST;
  Clock::time_point alone_until_;
};

// Calls body() on this thread and at the same time on those others that come in time, at most num_threads in all. Each
// takes from the work what is left of it.
template <class Body>
inline void parallel(int num_threads, Body& body, const int64_t* mine = nullptr, int64_t all = 0) {
  if (num_threads <= 1) return body();
  Threads::all().run([](void* data) { (*static_cast<Body*>(data))(); }, &body, num_threads, mine, all);
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
  const std::thread::id caller = std::this_thread::get_id();
  auto work = [&] {
    const bool is_caller = std::this_thread::get_id() == caller;
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
