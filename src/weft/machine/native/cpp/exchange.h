// The way of tokens to the experts of other ranks and back, through memory that the ranks of one host share: the
// exchanges of ranks/layers/exchange.py inside a stage.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "sum.h"

// Tokens [first, last) of some numbering.
struct Tokens {
    int64_t first, last;

    int64_t count() const { return last - first; }
    Tokens within(Tokens other) const {
        int64_t begin = std::clamp(first, other.first, other.last);
        return {begin, std::clamp(last, begin, other.last)};
    }
};

// One step's exchange among the ranks of `shared`. The tokens of all of them are numbered rank by rank: rank r brings
// [begins[r], begins[r + 1]). The rank's attention group has those from `first` on, and a result of the exchange is the
// sum over all ranks. `complete`: these are all the ranks that the layer is cut among. Mirrored in
// machine/native/structures.py.
//
// A chunk of tokens takes two turns. In the first one each rank's slot has the tokens that it brings, in the second one
// what its experts make of all tokens of the chunk.
struct Exchange {
    Shared shared;
    const int64_t *begins;
    int64_t first, complete;

    int64_t tokens() const { return begins[shared.size]; }
    Tokens brought(int64_t rank) const { return {begins[rank], begins[rank + 1]}; }
};

// The exchange of tokens of `hidden` elements which have chosen `top_k` experts each.
template <class T> class TokenExchange {
    const Exchange &exchange;
    const Shared &shared;
    const int64_t hidden, top_k;

    // Tokens in a slot: choices [count, top_k], then shares [count, top_k], then hidden states [count, hidden].
    struct Slot {
        int64_t *chosen;
        float *shares;
        T *x;
    };
    int64_t token_bytes() const { return top_k * (sizeof(int64_t) + sizeof(float)) + hidden * sizeof(T); }
    Slot slot(uint32_t turn, int64_t rank, int64_t count) const {
        int64_t *chosen = reinterpret_cast<int64_t *>(shared.slot(turn, rank));
        float *shares = reinterpret_cast<float *>(chosen + count * top_k);
        return {chosen, shares, reinterpret_cast<T *>(shares + count * top_k)};
    }

public:
    TokenExchange(const Exchange &exchange, int64_t hidden, int64_t top_k)
        : exchange(exchange), shared(exchange.shared), hidden(hidden), top_k(top_k) {}

    // The most tokens of a chunk.
    int64_t most() const { return shared.slot_bytes / token_bytes(); }

    // Publish those tokens of a chunk that this rank brings, and wait for those of the others. `x`, `chosen` and
    // `shares` begin with token `from`.
    void dispatch(Tokens chunk, const T *x, const int64_t *chosen, const float *shares, int64_t from) const {
        int64_t began = now_ns();
        Tokens own = exchange.brought(shared.rank).within(chunk);
        if (int64_t count = own.count()) {
            Slot to = slot(shared.turn() + 1, shared.rank, count);
            int64_t at = own.first - from;
            std::copy_n(chosen + at * top_k, count * top_k, to.chosen);
            std::copy_n(shares + at * top_k, count * top_k, to.shares);
            std::memcpy(to.x, x + at * hidden, count * hidden * sizeof(T));
        }
        shared.meet();
        shared.spent_since(began);
    }

    // After `dispatch`: copy the tokens `some` of a chunk. `x`, `chosen` and `shares` begin with the chunk.
    void receive(Tokens chunk, Tokens some, T *x, int64_t *chosen, float *shares) const {
        for (int64_t rank = 0; rank < shared.size; rank++) {
            Tokens brought = exchange.brought(rank).within(chunk), wanted = brought.within(some);
            int64_t count = wanted.count(), at = wanted.first - brought.first, to = wanted.first - chunk.first;
            if (!count) continue;
            Slot from = slot(shared.turn(), rank, brought.count());
            std::copy_n(from.chosen + at * top_k, count * top_k, chosen + to * top_k);
            std::copy_n(from.shares + at * top_k, count * top_k, shares + to * top_k);
            std::memcpy(x + to * hidden, from.x + at * hidden, count * hidden * sizeof(T));
        }
    }

    // Where this rank's experts put their results for the tokens of a chunk. `combine` is next: publish them, and wait
    // for those of the others.
    T *results() const { return reinterpret_cast<T *>(shared.slot(shared.turn() + 1, shared.rank)); }
    void publish() const {
        int64_t began = now_ns();
        shared.meet();
        shared.spent_since(began);
    }

    // After `publish`: x = the sums of all ranks' results for the tokens `some` of a chunk.
    void combine(Tokens chunk, Tokens some, T *x) const {
        shared.add_up((some.first - chunk.first) * hidden, x, some.count() * hidden);
    }
};
