// A team of threads that does a step together: who does what, and how nobody waits for a thread that has no core.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "patience.h"
#include "pool.h"
#include "work.h"

// What a team shares. Its work is a row of phases, each in pieces: a phase is over when its pieces are done, whoever
// did them, and the next begins. A thread that comes late finds fewer pieces, or none, and passes on.
class Board {
    static constexpr int SOON = 100;  // looks, some 2 us
    static constexpr int BITS = 20;   // of a count of pieces; the phase has the rest of a word

    // Of one thread's own range of pieces, how many are taken from its front and from its back, in this phase.
    struct alignas(64) Taken {
        std::atomic<uint64_t> word{0};
    };
    std::vector<Taken> taken;
    alignas(64) std::atomic<int64_t> done{0};  // pieces of this phase
    Signal over;                               // phases

public:
    static constexpr int64_t MOST = (1 << BITS) - 1;  // pieces of a range

    explicit Board(int size) : taken(size) {}

    // Of the pieces [first, last) that are `owner`'s in a phase the next one, or the last where another thread helps, so
    // that the owner goes on through its range in order; -1 where there is none left.
    int64_t take(uint32_t phase, int owner, bool helps, int64_t first, int64_t last) {
        std::atomic<uint64_t> &word = taken[owner].word;
        uint64_t seen = word.load(std::memory_order_relaxed);
        for (;;) {
            uint32_t then = uint32_t(seen >> 2 * BITS);
            uint64_t counts = then == phase ? seen : 0;
            int64_t front = counts >> BITS & MOST, back = counts & MOST;
            if (then > phase || front + back >= last - first) return -1;
            uint64_t mine = uint64_t(phase) << 2 * BITS | uint64_t(front + !helps) << BITS | uint64_t(back + helps);
            if (word.compare_exchange_weak(seen, mine, std::memory_order_relaxed))
                return helps ? last - 1 - back : first + front;
        }
    }

    // So many of a phase's pieces are done; whether they were the last, and the phase can end.
    bool report(int64_t count, int64_t pieces) {
        if (!count || done.fetch_add(count, std::memory_order_acq_rel) + count < pieces) return false;
        done.store(0, std::memory_order_relaxed);
        return true;
    }

    void end(uint32_t phase) { over.set(phase); }

    bool over_soon(uint32_t phase) const {
        for (int i = 0; i < SOON; i++, breathe())
            if (over.value() >= phase) return true;
        return false;
    }

    void wait(uint32_t phase) {
        over.wait([&](uint32_t now) { return now >= phase; });
    }
};

// One thread of a team. All of them go through the same phases.
class Team {
    static constexpr int64_t PIECES = 8;  // of a thread's range: what may be waited for is one of them
    uint32_t phase = 0;
    bool others_late = false;  // in the phase before
    Board &board;

public:
    const int rank, size;

    Team(int rank, int size, Board &board) : board(board), rank(rank), size(size) {}

    // Runs work(first, last) for all of `count` things, `grain` at a time, then then() once; returns when all is done.
    // Each thread has a range of its own, which it goes through in order, and then helps the others.
    void each(int64_t count, int64_t grain, Pieces work, Then then) {
        if (size == 1) {
            if (count) work(int64_t(0), count);
            return then();
        }
        if (!count) return lead(then);
        grain = std::max(grain, count / (size * Board::MOST) + 1);
        int64_t pieces = (count + grain - 1) / grain;
        bool were_late = others_late;
        others_late = false;
        phase++;
        // A range, as far as it has not been done; whether that was the end of the phase.
        auto go_through = [&](int owner) {
            int64_t first = pieces * owner / size, last = pieces * (owner + 1) / size, done = 0;
            for (int64_t piece; (piece = board.take(phase, owner, owner != rank, first, last)) >= 0; done++)
                work(piece * grain, std::min((piece + 1) * grain, count));
            others_late = others_late || (owner != rank && done);
            if (!board.report(done, pieces)) return false;
            then();
            board.end(phase);
            return true;
        };
        if (go_through(rank)) return;
        // Others are about to be through as well, and would lose more by a piece taken from them than it takes, unless
        // they are late: then they were most likely late before.
        if (!were_late && board.over_soon(phase)) return;
        for (int i = 1; i < size; i++)
            if (go_through((rank + i) % size)) return;
        board.wait(phase);
    }

    // In pieces of which each thread's range has some.
    void each(int64_t count, Pieces work, Then then = nothing) {
        each(count, std::max<int64_t>(1, count / (PIECES * size)), work, then);
    }

    // Runs work() in the thread that called, while the others wait.
    void lead(Then work) {
        phase++;
        if (rank == 0) {
            work();
            board.end(phase);
        }
        board.wait(phase);
    }
};

constexpr int64_t SMALL = 1 << 18;  // multiply-adds that one thread does sooner than two would meet, some 20 us

// Runs work(team) on every thread of a new team of up to `threads`: on one alone where `parallel` is false.
inline void together(int64_t threads, bool parallel, Work<Team &> work) {
    int size = parallel ? int(threads) : 1;
    Board board(size);
    auto part = [&](int rank) {
        Team team(rank, size, board);
        work(team);
    };
    if (size == 1) return part(0);
    Pool::mine().call(size, part);
}
