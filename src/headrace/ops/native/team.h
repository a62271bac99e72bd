// A team of threads that computes many short steps together: forked once, kept in step by barriers
// that cost less than waking anybody.
#pragma once

#include <atomic>

#include "common.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <sched.h>
#endif

namespace headrace {

// Whoever comes early watches memory; after a while it gives way, since its core may be the very
// one that a late member needs.
class Barrier {
 public:
  void wait(int members) {
    if (members == 1) return;
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++)
      spins < kSpins ? rest() : give_way();
  }

 private:
  static constexpr int kSpins = 2000;  // some tens of microseconds

  static void rest() {
#if HR_X86
    _mm_pause();
#endif
  }
  static void give_way() {
#ifdef __linux__
    sched_yield();
#endif
  }

  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

// One thread of a team: which of how many, and its share of what is split evenly.
struct Member {
  int index, count;
  Barrier* barrier;

  int64_t begin(int64_t items) const { return items * index / count; }
  int64_t end(int64_t items) const { return items * (index + 1) / count; }
  void wait() const { barrier->wait(count); }
};

// body(member) on at most `threads` threads, all of them at once.
template <class Body>
void run_team(int threads, const Body& body) {
  Barrier barrier;
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    body(Member{omp_get_thread_num(), omp_get_num_threads(), &barrier});
    return;
  }
#endif
  body(Member{0, 1, &barrier});
}

}  // namespace headrace
