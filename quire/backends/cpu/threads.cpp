// The threads, and what they do while there is nothing to do.
#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;
double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

class Threads {
 public:
  // For as long as the process lives: they may be asleep when it ends. A fork, which has not got them, makes its own.
  static Threads& all() {
    auto renew = [] { instance_ = new Threads; };
    static const int watched = (renew(), pthread_atfork(nullptr, nullptr, renew));
    (void)watched;
    return *instance_;
  }

  void run(void (*work)(void*), void* data, int num_threads, const int64_t* mine, int64_t all) {
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

}  // namespace

void run_together(void (*work)(void*), void* data, int num_threads, const int64_t* mine, int64_t all) {
  Threads::all().run(work, data, num_threads, mine, all);
}

}  // namespace quire
