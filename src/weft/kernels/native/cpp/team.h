// A team of threads that does a step together: who does what, and where they wait for each other.
#pragma once

#include <atomic>
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int SPINS = 1500;  // looks for somebody else, some 20 to 50 us, before one sleeps

// Between two looks.
inline void breathe() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Where all threads meet. A thread looks for the others for a while, then sleeps until they have come: between two
// products they differ by less, unless somebody else has their core.
class Meeting {
    std::atomic<int> come{0};
    std::atomic<int> turn{0};

public:
    alignas(64) std::atomic<int64_t> taken{0};  // since all met last

    void wait(int size) {
        int now = turn.load(std::memory_order_relaxed);
        if (come.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            come.store(0, std::memory_order_relaxed);
            taken.store(0, std::memory_order_relaxed);
            turn.store(now + 1, std::memory_order_release);
            if (size > 1) turn.notify_all();
            return;
        }
        for (int i = 0; i < SPINS; i++) {
            if (turn.load(std::memory_order_acquire) != now) return;
            breathe();
        }
        while (turn.load(std::memory_order_acquire) == now) turn.wait(now, std::memory_order_acquire);
    }
};

struct Range {
    int64_t first, last;
};

// One thread of a team.
struct Team {
    int rank, size;
    Meeting *meeting;

    void meet() const { meeting->wait(size); }
    // This thread's part of `count` things, all of nearly the same size.
    Range share(int64_t count) const { return {count * rank / size, count * (rank + 1) / size}; }
    // The first of the next `count` things that nobody has taken since all met last.
    int64_t take(int64_t count) const { return meeting->taken.fetch_add(count, std::memory_order_relaxed); }
};

constexpr int64_t SMALL = 1 << 18;  // multiply-adds that one thread does sooner than two would meet, some 20 us

// Runs work(team) on every thread of a new team: on one alone where `parallel` is false.
template <class Work> void together(bool parallel, const Work &work) {
    Meeting meeting;
#ifdef _OPENMP
#pragma omp parallel if (parallel)
    work(Team{omp_get_thread_num(), omp_get_num_threads(), &meeting});
#else
    work(Team{0, 1, &meeting});
#endif
}
