// A team of threads inside one OpenMP region, all running the same code, with a barrier that spins and then yields.
#pragma once

#include <algorithm>
#include <atomic>
#include <omp.h>
#include <sched.h>

namespace kvorum {

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Team {
  public:
    explicit Team(int size) : size_(size) {}

    int size() const { return size_; }

    // Wait for all; what is claimed from then on is claimed anew.
    void barrier() {
        if (size_ == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        const unsigned turn = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; ++spins) {
            if (spins > 2000) sched_yield();
            else relax();
        }
    }

    // Take a part of what is left of `count` items between two barriers, in units of `unit` items; false when all are
    // taken. Parts become smaller, so that members are done at about the same time.
    bool claim(int count, int unit, int& begin, int& end) {
        begin = next_.load(std::memory_order_relaxed);
        do {
            if (begin >= count) return false;
            const int part = size_ == 1 ? count : (count - begin) / (2 * size_) / unit * unit;
            end = std::min(count, begin + std::max(unit, part));
        } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
        return true;
    }

  private:
    const int size_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<unsigned> turn_{0};
};

// A member's view of its team.
struct Member {
    Team& team;
    int index;

    void barrier() const { team.barrier(); }

    // Call body(begin, end) with parts of `count` items until all members together have taken all: who is held up, since
    // another process runs on its core, takes fewer. One such loop between two barriers.
    template <class Body>
    void take_parts(int count, int unit, const Body& body) const {
        for (int begin, end; team.claim(count, unit, begin, end);) body(begin, end);
    }

    // This member's share [begin, end) of count items.
    void share(int count, int& begin, int& end) const {
        begin = int(long(count) * index / team.size());
        end = int(long(count) * (index + 1) / team.size());
    }
};

// Run body(member) on every member of a team; OpenMP may grant fewer threads than asked for.
template <class Body>
void run_team(int num_threads, const Body& body) {
    if (num_threads <= 1) {
        Team team(1);
        body(Member{team, 0});
        return;
    }
    Team* team = nullptr;
#pragma omp parallel num_threads(num_threads) shared(team)
    {
#pragma omp single
        team = new Team(omp_get_num_threads());
        body(Member{*team, omp_get_thread_num()});
    }
    delete team;
}

}  // namespace kvorum
