// Waiting for another thread: looking for a while, then asleep.
#pragma once

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
constexpr int LOOKS = 64;               // between two glances at the clock

// Looks for something for a while; whether it came. Between two products threads differ by less, unless somebody else
// has their core.
template <class Come> bool look_for(const Come &come) {
    auto now = [] {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
    };
    for (int64_t end = 0;;) {
        for (int i = 0; i < LOOKS; i++) {
            if (come()) return true;
#ifdef __x86_64__
            _mm_pause();
#endif
        }
        int64_t time = now();
        if (!end) end = time + PATIENCE_NS;
        if (time > end) return false;
    }
}

// A number that one thread changes and others wait for; on Linux it may be a thread of another process, where the memory
// is shared. All zero is its beginning.
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

    template <class Come> uint32_t asleep(const Come &come, bool briefly) {
        for (;;) {
            uint32_t seen = number.load(std::memory_order_acquire);
            if (come(seen)) return seen;
            sleepers.fetch_add(1);
            sleep(seen, briefly);
            sleepers.fetch_sub(1);
        }
    }

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

    // Its value once come(value), in the midst of a step. Not asleep for ever: another process may be stopped between its
    // change and its waking us.
    template <class Come> uint32_t wait(const Come &come) {
        uint32_t seen;
        auto there = [&] { return come(seen = number.load(std::memory_order_acquire)); };
        return look_for(there) ? seen : asleep(come, true);
    }

    // The same for what may take long: without a look, and asleep until then.
    template <class Come> uint32_t sleep_until(const Come &come) { return asleep(come, false); }
};
