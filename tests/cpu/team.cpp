// What native/cpp/team.h promises. Prints what it breaks first and fails, or hangs, where it waits for one that
// must not be waited for.
#include "team.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(what) ((what) ? void(0) : (std::printf("line %d: %s\n", __LINE__, #what), std::exit(1)))

// Each thing is done once in each phase, after the phase before is over, and what comes then once, after the last.
void each_once(int threads, int64_t count) {
    constexpr int PHASES = 200;
    std::vector<std::atomic<int>> done(count);
    std::atomic<int> over{0};
    together(threads, true, [&](Team &team) {
        for (int phase = 0; phase < PHASES; phase++)
            team.each(
                count,
                [&](int64_t first, int64_t last) {
                    CHECK(0 <= first && first < last && last <= count);
                    CHECK(over == phase);
                    for (int64_t i = first; i < last; i++) CHECK(done[i].fetch_add(1) == phase);
                },
                [&] {
                    for (auto &times : done) CHECK(times == phase + 1);
                    over++;
                });
    });
    CHECK(over == PHASES);
}

// More pieces than are counted for a thread's range: larger ones, and all of them.
void many(int threads) {
    const int64_t count = Board::MAX_PIECES * threads * 2 + 5;
    std::atomic<int64_t> all{0};
    together(threads, true, [&](Team &team) {
        team.each(count, 1, [&](int64_t first, int64_t last) { all += last - first; }, nothing);
    });
    CHECK(all == count);
}

// A thread that comes when all is over is not waited for, and finds nothing to do.
void late(int threads) {
    std::atomic<bool> here{false}, over{false};
    std::atomic<int> by_late{0}, all{0};
    together(threads, true, [&](Team &team) {
        if (team.rank == 1) {
            here = true;
            while (!over) sched_yield();
        }
        if (team.rank == 0)
            while (!here) sched_yield();
        for (int phase = 0; phase < 50; phase++)
            team.each(100, [&](int64_t first, int64_t last) {
                all += int(last - first);
                if (team.rank == 1) by_late++;
            });
        if (team.rank == 0) over = true;
    });
    CHECK(all == 50 * 100);
    CHECK(by_late == 0);
}

// One that sleeps with a piece is waited for, and its range is done by others meanwhile.
void slow(int threads) {
    std::atomic<bool> held{false};
    std::atomic<int64_t> all{0};
    together(threads, true, [&](Team &team) {
        team.each(64, 1, [&](int64_t first, int64_t) {
            // Whoever takes this one keeps it until the rest is done.
            if (first == 40) {
                held = true;
                while (all < 63) sched_yield();
            }
            all++;
        }, nothing);
        CHECK(all == 64);
    });
    CHECK(held);
}

// Calls so short that helpers come to some, miss others, and are late for most.
void short_calls(int threads) {
    int64_t sum = 0;
    for (int call = 0; call < 5000; call++) {
        std::atomic<int64_t> part{0};
        together(threads, true, [&](Team &team) {
            team.each(3, 1, [&](int64_t first, int64_t last) { part += last - first; }, nothing);
            team.lead([&] { CHECK(team.rank == 0 && part == 3); });
        });
        sum += part;
    }
    CHECK(sum == 15000);
}

// Counts that the phase before has found. A thread that is late may read those of a later phase, which may be 0.
void found(int threads) {
    constexpr int64_t PHASES = 3000;
    std::atomic<int64_t> count{0}, done{0}, wanted{0}, thens{0};
    together(threads, true, [&](Team &team) {
        for (int64_t phase = 0; phase < PHASES; phase++) {
            team.each(1, [&](int64_t, int64_t) {}, [&] {
                count = phase % 3 * 5;
                wanted += count;
            });
            if ((phase + team.rank) % 7 == 0) sched_yield();
            team.each(count, 1, [&](int64_t first, int64_t last) { done += last - first; }, [&] {
                CHECK(done == wanted && thens++ == phase);
            });
        }
    });
    CHECK(thens == PHASES && done == wanted);
}

int main() {
    for (int threads : {1, 2, 3, 8}) found(threads);
    for (int threads : {1, 2, 3, 8})
        for (int64_t count : {0, 1, 2, 7, 100, 1000}) each_once(threads, count);
    for (int threads : {2, 5}) late(threads), slow(threads), short_calls(threads), many(threads);
}
