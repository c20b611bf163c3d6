// A chain of small pieces of work on several CPU threads without going back to PyTorch in between: its parallel_for
// costs 5 to 10 microseconds each time, where a decode step has a hundred pieces of a few microseconds.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu.h"

namespace cog_rwkv {

class Team {
 public:
  // All members make the same calls of share() in the same order, at most `stages`; each call does one piece of work,
  // whoever is there, and returns when the whole of it is done.
  class Member {
   public:
    // body(begin, end) over cuts of [0, units), `least` units or more each. A result must not depend on the cuts.
    template <class Body>
    void share(int64_t units, int64_t least, const Body& body) {
      Stage& stage = team_.stages_[next_++];
      for (int64_t begin, end; team_.take(stage, units, least, begin, end);) {
        body(begin, end);
        stage.done.fetch_add(end - begin, std::memory_order_acq_rel);
      }
      for (int64_t spins = 0; stage.done.load(std::memory_order_acquire) < units; spins++) {
        if (spins < kSpins) {
          pause();
        } else {
          std::this_thread::yield();  // another program has the processor that we wait for
        }
      }
    }

   private:
    friend class Team;
    explicit Member(Team& team) : team_(team) {}
    Team& team_;
    size_t next_ = 0;
  };

  explicit Team(int64_t stages) : stages_(stages), threads_(torch::stable::get_num_threads()) {}

  // body(member) on each thread of PyTorch's pool. How many of them really run, and when, does not matter: work is
  // taken by those who are there, and who comes late finds it done.
  template <class Body>
  void run(const Body& body) {
    parallel_for(threads_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        Member member(*this);
        body(member);
      }
    });
  }

 private:
  static constexpr int64_t kSpins = 4096;

  struct alignas(64) Stage {
    std::atomic<int64_t> taken{0};
    alignas(64) std::atomic<int64_t> done{0};
  };

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  // Long cuts first, so that each thread reads memory in order, and short ones at the end, so that all end together.
  bool take(Stage& stage, int64_t units, int64_t least, int64_t& begin, int64_t& end) const {
    begin = stage.taken.load(std::memory_order_relaxed);
    do {
      if (begin >= units) return false;
      const int64_t left = units - begin, share = threads_ > 1 ? left / (2 * threads_) : left;
      end = std::min(units, begin + std::max(least, share));
    } while (!stage.taken.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return true;
  }

  std::vector<Stage> stages_;
  int64_t threads_;
};

}  // namespace cog_rwkv
