// A team of threads that computes a step together, and in which no thread waits for another one that has no core.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "patience.h"
#include "pool.h"
#include "work.h"

// The state that a team shares. Its work is a sequence of phases, each in pieces. A phase is over when all of its
// pieces are done, by whichever threads, and then the next one begins. A late thread finds fewer pieces, or none, and
// goes on.
class Board {
    static constexpr int SOON = 100;  // looks, some 2 us
    static constexpr int BITS = 20;   // of a count of pieces; the other bits of the word are the phase

    // Numbers of pieces that are taken from the front and from the back of one thread's range, in this phase.
    struct alignas(64) Taken {
        std::atomic<uint64_t> word{0};
    };
    std::vector<Taken> taken;
    alignas(64) std::atomic<int64_t> done{0};  // pieces of this phase
    Signal over;                               // number of phases that are over

public:
    static constexpr int64_t MAX_PIECES = (1 << BITS) - 1;  // pieces of a range

    explicit Board(int size) : taken(size) {}

    // Take one of the pieces [first, last) that are `owner`'s in a phase: the next one, or the last one if another
    // thread `helps`, so that the owner goes through its range in order. Returns -1 if none is left.
    int64_t take(uint32_t phase, int owner, bool helps, int64_t first, int64_t last) {
        std::atomic<uint64_t> &word = taken[owner].word;
        uint64_t seen = word.load(std::memory_order_relaxed);
        for (;;) {
            uint32_t then = uint32_t(seen >> 2 * BITS);
            uint64_t counts = then == phase ? seen : 0;
            int64_t front = counts >> BITS & MAX_PIECES, back = counts & MAX_PIECES;
            if (then > phase || front + back >= last - first) return -1;
            uint64_t mine = uint64_t(phase) << 2 * BITS | uint64_t(front + !helps) << BITS | uint64_t(back + helps);
            if (word.compare_exchange_weak(seen, mine, std::memory_order_relaxed))
                return helps ? last - 1 - back : first + front;
        }
    }

    // Report that `count` of a phase's pieces are done. Returns true if they were the last, so that the phase can end.
    bool report(int64_t count, int64_t pieces) {
        if (!count || done.fetch_add(count, std::memory_order_acq_rel) + count < pieces) return false;
        done.store(0, std::memory_order_relaxed);
        return true;
    }

    void end(uint32_t phase) { over.set(phase); }

    bool is_over(uint32_t phase) const { return over.value() >= phase; }

    bool over_soon(uint32_t phase) const {
        for (int i = 0; i < SOON; i++, relax_cpu())
            if (is_over(phase)) return true;
        return false;
    }

    void wait(uint32_t phase) {
        over.wait([&](uint32_t now) { return now >= phase; });
    }
};

// One thread of a team. All of them go through the same phases.
class Team {
    static constexpr int64_t PIECES = 8;  // in a thread's range: a thread waits for one of them at most
    uint32_t phase = 0;
    bool others_late = false;  // in the last phase
    Board &board;

public:
    const int rank, size;

    Team(int rank, int size, Board &board) : board(board), rank(rank), size(size) {}

    // Run work(first, last) for all of `count` elements, `grain` at a time, then then() once. Returns when all is done.
    // Each thread has a range of its own, which it goes through in order; then it helps the others. `count` and `grain`
    // may be results of the phase before.
    void each(int64_t count, int64_t grain, Pieces work, Then then) {
        if (size == 1) {
            if (count) work(int64_t(0), count);
            return then();
        }
        phase++;
        // A thread that is so late may have read a count that is a later phase's already.
        if (board.is_over(phase)) return;
        grain = std::max(grain, count / (size * Board::MAX_PIECES) + 1);
        int64_t pieces = std::max<int64_t>(1, (count + grain - 1) / grain);
        bool were_late = others_late;
        others_late = false;
        // Do what is left of a thread's range. Returns true if that ended the phase.
        auto go_through = [&](int owner) {
            int64_t first = pieces * owner / size, last = pieces * (owner + 1) / size, done = 0;
            for (int64_t piece; (piece = board.take(phase, owner, owner != rank, first, last)) >= 0; done++)
                if (count) work(piece * grain, std::min((piece + 1) * grain, count));
            others_late = others_late || (owner != rank && done);
            if (!board.report(done, pieces)) return false;
            then();
            board.end(phase);
            return true;
        };
        if (go_through(rank)) return;
        // The others are about to finish as well: taking a piece from them would cost more than it saves, unless they
        // are late. A thread that is late most likely was late in the last phase.
        if (!were_late && board.over_soon(phase)) return;
        for (int i = 1; i < size; i++)
            if (go_through((rank + i) % size)) return;
        board.wait(phase);
    }

    // The same in pieces of which each thread's range has up to PIECES.
    void each(int64_t count, Pieces work, Then then = nothing) {
        each(count, std::max<int64_t>(1, count / (PIECES * size)), work, then);
    }

    // Run work() in the calling thread (rank 0), while the others wait.
    void lead(Then work) {
        phase++;
        if (rank == 0) {
            work();
            board.end(phase);
        }
        board.wait(phase);
    }
};

constexpr int64_t SMALL = 1 << 18;  // multiply-adds: one thread does fewer sooner than two would meet, some 20 us

// Run work(team) on every thread of a new team of up to `threads`, or on one thread if `parallel` is false.
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
