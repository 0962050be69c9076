// Waiting for another thread: spin for a while, then sleep.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <ctime>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <pthread.h>
#endif
#ifdef __x86_64__
#include <immintrin.h>
#endif

// Nanoseconds of the monotonic clock: some 25 ns to read.
inline int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

constexpr int64_t PATIENCE_NS = 40000;  // to spin before a thread sleeps

// Spin until arrived() is true, with pause() after each look, and read the clock after every `looks` of them. Returns
// false once PATIENCE_NS are over.
template <class Arrived, class Pause> bool spin_for(const Arrived &arrived, int looks, const Pause &pause) {
    for (int64_t end = 0;;) {
        for (int i = 0; i < looks; i++) {
            if (arrived()) return true;
            pause();
        }
        int64_t time = now_ns();
        if (!end) end = time + PATIENCE_NS;
        if (time > end) return false;
    }
}

inline void relax_cpu() {
#ifdef __x86_64__
    _mm_pause();
#endif
}

// A number that one thread changes and others wait for. On Linux the threads may belong to several processes, which
// share the memory. A Signal of all-zero bytes is a valid initial one.
class alignas(64) Signal {
    std::atomic<uint32_t> number{0}, sleepers{0};
    std::atomic<int64_t> changed_ns[2] = {};  // of the last change to an even and to an odd number, where it is told

#ifdef __linux__
    void sleep(uint32_t seen, bool briefly) {
        timespec second{1, 0};
        syscall(SYS_futex, &number, FUTEX_WAIT, seen, briefly ? &second : nullptr, nullptr, 0);
    }
    void wake() { syscall(SYS_futex, &number, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }
#else
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

    void sleep(uint32_t seen, bool) {
        pthread_mutex_lock(&mutex);
        if (number.load() == seen) pthread_cond_wait(&changed, &mutex);
        pthread_mutex_unlock(&mutex);
    }
    void wake() {
        pthread_mutex_lock(&mutex);
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&mutex);
    }
#endif

public:
    uint32_t value() const { return number.load(); }

    // Set the number, and tell when: read_ns(to) has it until the number after the next one.
    void set_at(uint32_t to, int64_t now) {
        changed_ns[to & 1].store(now, std::memory_order_relaxed);
        set(to);
    }
    int64_t read_ns(uint32_t of) const { return changed_ns[of & 1].load(std::memory_order_relaxed); }

    void set(uint32_t to) {
        number.store(to);
        if (sleepers.load()) wake();
    }

    // Add one, or subtract one; threads that wait for zero are woken then.
    void enter() { number.fetch_add(1); }
    void leave() {
        if (number.fetch_sub(1) == 1 && sleepers.load()) wake();
    }

    // Wait until accept(value) is true; return the value. For waits within a step, where threads differ by less than
    // PATIENCE_NS, unless another program has their core. Sleeps for a second at most, then looks again: another
    // process may be stopped between its change and its call that wakes us.
    template <class Accept> uint32_t wait(const Accept &accept) {
        return wait(accept, true, [&](const auto &arrived) { return spin_for(arrived, 64, relax_cpu); });
    }

    // The same for waits between calls: any other thread that wants this core gets it at once.
    template <class Accept> uint32_t wait_idle(const Accept &accept) {
        return wait(accept, false, [&](const auto &arrived) { return spin_for(arrived, 4, sched_yield); });
    }

private:
    template <class Accept, class Spin> uint32_t wait(const Accept &accept, bool briefly, const Spin &spin) {
        uint32_t seen;
        auto arrived = [&] { return accept(seen = number.load(std::memory_order_acquire)); };
        if (!spin(arrived))
            while (!arrived()) {
                sleepers.fetch_add(1);
                sleep(seen, briefly);
                sleepers.fetch_sub(1);
            }
        return seen;
    }
};
