// Waiting for another thread: looking for a while, then asleep.
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

constexpr int64_t PATIENCE_NS = 40000;  // how long to look before one sleeps

// Looks for something for a while, with `rest` after each look and a glance at the clock after `looks` of them; whether
// it came.
template <class Come, class Rest> bool look_for(const Come &come, int looks, const Rest &rest) {
    auto now = [] {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
    };
    for (int64_t end = 0;;) {
        for (int i = 0; i < looks; i++) {
            if (come()) return true;
            rest();
        }
        int64_t time = now();
        if (!end) end = time + PATIENCE_NS;
        if (time > end) return false;
    }
}

inline void breathe() {
#ifdef __x86_64__
    _mm_pause();
#endif
}

// A number that one thread changes and others wait for; on Linux it may be a thread of another process, where the
// memory is shared. All zero is its beginning.
class alignas(64) Signal {
    std::atomic<uint32_t> number{0}, sleepers{0};

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

    void set(uint32_t to) {
        number.store(to);
        if (sleepers.load()) wake();
    }

    // By one more, or by one less; who waits for zero is woken then.
    void enter() { number.fetch_add(1); }
    void leave() {
        if (number.fetch_sub(1) == 1 && sleepers.load()) wake();
    }

    // Its value once come(value). In the midst of a step, where threads differ by less than our patience, unless
    // somebody else has their core; not asleep for ever: another process may be stopped between its change and its
    // waking us.
    template <class Come> uint32_t wait(const Come &come) {
        return wait(come, true, [&](const auto &there) { return look_for(there, 64, breathe); });
    }

    // The same between calls: whoever else wants our core may have it at once.
    template <class Come> uint32_t wait_idle(const Come &come) {
        return wait(come, false, [&](const auto &there) { return look_for(there, 4, sched_yield); });
    }

private:
    template <class Come, class Look> uint32_t wait(const Come &come, bool briefly, const Look &look) {
        uint32_t seen;
        auto there = [&] { return come(seen = number.load(std::memory_order_acquire)); };
        if (!look(there))
            while (!there()) {
                sleepers.fetch_add(1);
                sleep(seen, briefly);
                sleepers.fetch_sub(1);
            }
        return seen;
    }
};
