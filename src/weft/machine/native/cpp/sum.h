// The sum over ranks that are processes of one host, through memory that they share: see ranks/comm/shared.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "patience.h"

// Mirrored in machine/native/structures.py. The first `head` bytes of the memory hold a Signal per rank: the number of the turn
// that the rank has come to. Two turns of one slot per rank follow: a rank that is ahead writes to the next turn while
// others still read the last one.
//
// `times` are nanoseconds of this rank: in all its exchanges, and of those waiting for the other ranks. One thread of the
// rank writes them at a time.
struct Shared {
    char *memory;
    int64_t rank, size, head, slot_bytes;
    int64_t *times;

    Signal &bell(int64_t rank) const { return reinterpret_cast<Signal *>(memory)[rank]; }
    char *slot(uint32_t turn, int64_t rank) const { return memory + head + ((turn & 1) * size + rank) * slot_bytes; }

    // The turn that this rank has come to.
    uint32_t turn() const { return bell(rank).value(); }

    // Come to the next turn, for which this rank's slot has been written, and wait until all ranks have.
    void meet() const {
        uint32_t next = turn() + 1;
        int64_t began = now_ns(), last = began;
        bell(rank).set_at(next, began);
        for (int64_t r = 0; r < size; r++) {
            bell(r).wait([&](uint32_t reached) { return int32_t(reached - next) >= 0; });
            last = std::max(last, bell(r).read_ns(next));
        }
        // Until the last one came: if this thread gets its core back later than that, nobody else is to blame.
        times[1] += last - began;
    }

    // Add the time since `began` to that of all exchanges.
    void spent_since(int64_t began) const { times[0] += now_ns() - began; }

    // x = the sum of all ranks' x, added in the order of ranks and rounded once: every rank gets the same bits.
    template <class T> void sum(T *x, int64_t count) const {
        int64_t began = now_ns();
        for (int64_t most = slot_bytes / sizeof(T); count > 0; x += most, count -= most) {
            int64_t n = std::min(most, count);
            std::memcpy(slot(turn() + 1, rank), x, n * sizeof(T));
            meet();
            add_up(0, x, n);
        }
        spent_since(began);
    }

    // x = the sum of `count` elements from element `first` on of all ranks' slots of this turn.
    template <class T> void add_up(int64_t first, T *x, int64_t count) const {
        constexpr int64_t PIECE = 256;
        for (int64_t at = 0; at < count; at += PIECE) {
            int64_t n = std::min(PIECE, count - at);
            float total[PIECE] = {};
            for (int64_t r = 0; r < size; r++) {
                const T *part = reinterpret_cast<const T *>(slot(turn(), r)) + first + at;
#pragma omp simd
                for (int64_t i = 0; i < n; i++) total[i] += widen(part[i]);
            }
            narrow_row(total, x + at, n);
        }
    }
};
