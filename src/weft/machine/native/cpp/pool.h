// Helper threads. Each calling thread has some of its own, on its cores; they sleep between its calls.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <vector>

#include "patience.h"
#include "work.h"

// Helpers enter a call while it is open. Nothing waits for a helper that comes after the call was closed.
class Pool {
    struct Place {
        Pool *pool;
        int rank;  // from 1 on; the caller is 0
    };
    static constexpr size_t STACK = 2 << 20;  // bytes: attention takes some 300 KB

    std::vector<pthread_t> helpers;
    // Numbers of the last call that was opened and closed. `inside` counts helpers that may be in a call.
    Signal opened, closed, inside;
    const Work<int> *work = nullptr;
    int size = 1;
    bool over = false;

    void help(int rank) {
        for (uint32_t last = 0;;) {
            last = opened.wait_idle([&](uint32_t now) { return now != last; });
            if (over) return;
            inside.enter();
            // Either the caller sees that we are inside, or we see that it has closed the call.
            if (closed.value() == last - 1 && rank < size) (*work)(rank);
            inside.leave();
        }
    }

    static void *run_helper(void *given) {
        Place place = *static_cast<Place *>(given);
        delete static_cast<Place *>(given);
        place.pool->help(place.rank);
        return nullptr;
    }

    void grow(int count) {
        // Signals are handled by the threads of the program that loaded the library.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, STACK);
        while (int(helpers.size()) < count) {
            auto *place = new Place{this, int(helpers.size()) + 1};
            pthread_t helper;
            if (pthread_create(&helper, &attributes, run_helper, place)) {
                delete place;
                break;  // then there are fewer helpers
            }
            helpers.push_back(helper);
        }
        pthread_attr_destroy(&attributes);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    Pool() = default;

public:
    // The pool of the calling thread.
    static Pool &mine() {
        static thread_local Pool pool;
        return pool;
    }

    ~Pool() {
        over = true;
        opened.set(opened.value() + 1);
        for (pthread_t helper : helpers) pthread_join(helper, nullptr);
    }

    // Run work(rank) in this thread as rank 0, and in the helpers of ranks below `count` that come in time.
    void call(int count, Work<int> work) {
        if (int(helpers.size()) < count - 1) grow(count - 1);
        this->work = &work;
        size = count;
        uint32_t number = opened.value() + 1;
        opened.set(number);
        work(0);
        closed.set(number);
        inside.wait([](uint32_t count) { return count == 0; });
    }
};
