// The sum over ranks that are processes of one host, through memory that they share: see comm/shared.py.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#ifdef __linux__
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "numbers.h"
#include "team.h"

// One rank's, at the beginning of the memory: the turns that it has come to, and how many sleep until the next.
struct alignas(64) Bell {
    std::atomic<uint32_t> turn, sleepers;
};

// As in native/stage.py. The memory has a Bell per rank in its first `head` bytes, then two turns of a slot per rank: a
// rank that is ahead writes to the next while others still read the last.
struct Shared {
    char *memory;
    int64_t rank, size, head, slot_bytes;

    Bell &bell(int64_t rank) const { return reinterpret_cast<Bell *>(memory)[rank]; }
    char *slot(uint32_t turn, int64_t rank) const { return memory + head + ((turn & 1) * size + rank) * slot_bytes; }

    void ring(uint32_t turn) const {
        Bell &mine = bell(rank);
        mine.turn.store(turn);
#ifdef __linux__
        if (mine.sleepers.load()) syscall(SYS_futex, &mine.turn, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
    }

    // Until rank `other` has come to `turn`: looking for it for a while, then asleep.
    void wait_for(int64_t other, uint32_t turn) const {
        Bell &bell = this->bell(other);
        uint32_t seen;
        for (int i = 0; int32_t((seen = bell.turn.load(std::memory_order_acquire)) - turn) < 0; i++) {
            breathe();
#ifdef __linux__
            if (i < SPINS) continue;
            // Not for ever: whoever is stopped in between is woken by nobody.
            timespec second{1, 0};
            bell.sleepers.fetch_add(1);
            syscall(SYS_futex, &bell.turn, FUTEX_WAIT, seen, &second, nullptr, 0);
            bell.sleepers.fetch_sub(1);
#endif
        }
    }

    // x = the sum of all ranks' x, in the order of ranks, rounded once: the same bits on each.
    template <class T> void sum(T *x, int64_t count) const {
        for (int64_t most = slot_bytes / sizeof(T); count > 0; x += most, count -= most) {
            int64_t n = std::min(most, count);
            uint32_t turn = bell(rank).turn.load(std::memory_order_relaxed) + 1;
            std::memcpy(slot(turn, rank), x, n * sizeof(T));
            ring(turn);
            for (int64_t r = 0; r < size; r++) wait_for(r, turn);
            add_up(turn, x, n);
        }
    }

    template <class T> void add_up(uint32_t turn, T *x, int64_t count) const {
        constexpr int64_t PIECE = 256;
        for (int64_t at = 0; at < count; at += PIECE) {
            int64_t n = std::min(PIECE, count - at);
            float total[PIECE] = {};
            for (int64_t r = 0; r < size; r++) {
                const T *part = reinterpret_cast<const T *>(slot(turn, r)) + at;
#pragma omp simd
                for (int64_t i = 0; i < n; i++) total[i] += widen(part[i]);
            }
            narrow_row(total, x + at, n);
        }
    }
};
