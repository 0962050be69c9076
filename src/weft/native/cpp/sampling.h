// Sampling: a token for each row of logits, without a sort of them. worker/random.py tells of the race and
// worker/filters.py of the filters, each of which is a threshold.
#pragma once

#include <cmath>

#include "places.h"
#include "team.h"

constexpr int64_t RACERS = 256;  // tokens that race as one: BLOCK of kernels/streams.py
constexpr int64_t NUCLEUS = 64;  // tokens: most answers' top-p fits

// As in `SamplingSettings` of worker/token_sampler.py: temperature 0 is greedy, a top_k of 0 keeps all.
struct Wish {
    double temperature, log_min_p, top_k, top_p;
};

constexpr int64_t BROKEN = -1;  // as in kernels/streams.py: in place of a token of logits that are not finite

// A number of a random stream, see `exponentials` of worker/random.py.
inline double time_of(uint64_t stream, uint64_t index) {
    uint64_t x = stream + (index + 1) * 0x9E3779B97F4A7C15;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    x = (x ^ x >> 31) >> 12;
    return -std::log((double(x) + 0.5) * 0x1p-52);
}

// The weight of a place: e^((x - best) / temperature).
struct Weigher {
    float best, temperature;

    float operator()(int32_t place) const {
        float x = (number(place) - best) / temperature;
        return x > -87.0f ? exp_moderate(x) : 0.0f;
    }
};

// The sum of weights of places from `floor` up.
inline float weigh(const int32_t *places, int64_t count, int32_t floor, Weigher weight) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        float w = weight(places[i]);
        sum += places[i] >= floor ? w : 0.0f;
    }
    return sum;
}

// Tokens of about the same weight: buckets, the greatest weights first, whose borders are a factor of e^(1 / FINE) apart.
constexpr int64_t FINE = 32, BUCKETS = 87 * FINE + 1;

inline void find_buckets(const int32_t *places, int64_t count, Weigher weight, int32_t *buckets, float *weights) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float x = (weight.best - number(places[i])) / weight.temperature;
        buckets[i] = int32_t((x < 87.0f ? x : 87.0f) * FINE);
        weights[i] = weight(places[i]);
    }
}

// One row at a time.
class Draw {
    std::vector<int32_t> places, tops, some;  // of all tokens, the highest of each block, and a selection of them
    std::vector<float> sums;                  // of each block's weights
    int64_t vocab, blocks;
    Weigher weight;

    int64_t members(int64_t block) const { return std::min(RACERS, vocab - block * RACERS); }

    // The first of the best.
    int64_t greedy(int32_t best) const {
        int64_t block = std::find(tops.begin(), tops.end(), best) - tops.begin();
        return std::find(places.begin() + block * RACERS, places.end(), best) - places.begin();
    }

    // All places from `low` up, into `some`.
    void select(int32_t low) {
        some.resize(vocab);
        int64_t count = 0;
        for (int64_t b = 0; b < blocks; b++)
            if (tops[b] >= low)
                for (int64_t i = b * RACERS; i < b * RACERS + members(b); i++) {
                    some[count] = places[i];
                    count += places[i] >= low;
                }
        some.resize(count);
    }

    int32_t kth(int64_t k) {
        select(reached_by(k, tops, some));
        std::nth_element(some.begin(), some.begin() + k - 1, some.end(), std::greater<>());
        return some[k - 1];
    }

    // Of the selected places, the greatest first, the one with which the sum of weights reaches `goal`; whether it does.
    bool reach(double goal, int32_t &last) {
        auto first = some.begin(), stop = some.end();
        double sum = 0;
        while (stop - first > NUCLEUS) {
            auto middle = first + (stop - first) / 2;
            std::nth_element(first, middle, stop, std::greater<>());
            double half = weigh(&*first, middle - first, LOWEST, weight);
            if (sum + half >= goal) {
                stop = middle;
            } else {
                sum += half;
                first = middle;
            }
        }
        std::sort(first, stop, std::greater<>());
        for (; first < stop; ++first) {
            sum += weight(last = *first);
            if (sum >= goal) return true;
        }
        return false;
    }

    // Into `some`, of the places from `floor` up, the bucket with which the sum of weights, the greatest first, reaches
    // `goal`. Returns what the buckets before it leave of the goal.
    double narrow_down(double goal, int32_t floor) {
        int32_t buckets[RACERS];
        float weights[RACERS];
        std::vector<double> mass(BUCKETS);
        auto each_block = [&](auto what) {
            for (int64_t b = 0; b < blocks; b++) {
                if (tops[b] < floor) continue;
                const int32_t *at = &places[b * RACERS];
                find_buckets(at, members(b), weight, buckets, weights);
                for (int64_t i = 0; i < members(b); i++)
                    if (at[i] >= floor) what(at[i], buckets[i], weights[i]);
            }
        };
        each_block([&](int32_t, int32_t bucket, float weight) { mass[bucket] += weight; });
        int64_t which = 0;
        for (; which < BUCKETS - 1 && mass[which] < goal; which++) goal -= mass[which];
        some.clear();
        each_block([&](int32_t place, int32_t bucket, float) {
            if (bucket == which) some.push_back(place);
        });
        return goal;
    }

    // The weights of places from `floor` up, by blocks, and their sum.
    double weigh_blocks(int32_t floor) {
        double total = 0;
        for (int64_t b = 0; b < blocks; b++) {
            sums[b] = tops[b] >= floor ? weigh(&places[b * RACERS], members(b), floor, weight) : 0;
            total += sums[b];
        }
        return total;
    }

    // The least place that the filters leave.
    int32_t floor_of(const Wish &wish) {
        int32_t floor = LOWEST;
        if (wish.log_min_p > -std::numeric_limits<double>::infinity())
            floor = place(weight.best + weight.temperature * float(wish.log_min_p));
        if (wish.top_k > 0 && wish.top_k < double(vocab)) floor = std::max(floor, kth(int64_t(wish.top_k)));
        if (wish.top_p < 1) {
            double goal = weigh_blocks(floor) * wish.top_p;
            int32_t low = std::max(floor, reached_by(NUCLEUS, tops, some)), last = low;
            select(low);
            if (!reach(goal, last) && low > floor) {
                goal = narrow_down(goal, floor);
                last = floor;
                reach(goal, last);
            }
            floor = last;
        }
        return floor;
    }

    int64_t race(uint64_t stream, int32_t floor) const {
        double most = 0;
        int64_t block = 0, token = 0;
        for (int64_t b = 0; b < blocks; b++) {
            double speed = sums[b] > 0 ? double(sums[b]) / time_of(stream, b) : 0;
            if (speed > most) most = speed, block = b;
        }
        most = 0;
        for (int64_t i = 0; i < members(block); i++) {
            int32_t at = places[block * RACERS + i];
            float w = at >= floor ? weight(at) : 0.0f;
            double speed = w > 0 ? double(w) / time_of(stream, blocks + i) : 0;
            if (speed > most) most = speed, token = block * RACERS + i;
        }
        return token;
    }

public:
    template <class T> void read(const T *logits, int64_t count) {
        vocab = count, blocks = (vocab + RACERS - 1) / RACERS;
        places.resize(vocab), tops.resize(blocks), sums.resize(blocks);
        for (int64_t b = 0; b < blocks; b++)
            tops[b] = find_places(logits + b * RACERS, members(b), &places[b * RACERS]);
    }

    // Of the row that was read.
    int64_t token(const Wish &wish, uint64_t stream) {
        int32_t best = *std::max_element(tops.begin(), tops.end());
        if (best >= INFINITE || best <= NEVER) return BROKEN;
        if (wish.temperature == 0) return greedy(best);
        weight = {number(best), float(wish.temperature)};
        int32_t floor = floor_of(wish);
        weigh_blocks(floor);
        return race(stream, floor);
    }
};

// tokens [rows], from logits [rows, vocab] whose rows are `stride` apart, as each of `wishes` asks, with its stream. Of
// `size` 2 they are bf16, else float, as logits are that have been shaped, whatever is computed in.
inline void choose(const void *logits, int64_t size, int64_t rows, int64_t vocab, int64_t stride, const Wish *wishes,
                   const uint64_t *streams, int64_t *tokens, int64_t threads) {
    auto some = [&](int64_t first, int64_t last) {
        static thread_local Draw draw;  // whose memory is kept for the next step
        for (int64_t r = first; r < last; r++) {
            if (size == 2)
                draw.read(static_cast<const bf16 *>(logits) + r * stride, vocab);
            else
                draw.read(static_cast<const float *>(logits) + r * stride, vocab);
            tokens[r] = draw.token(wishes[r], streams[r]);
        }
    };
    together(threads, rows > 1, [&](Team &team) { team.each(rows, 1, some, nothing); });
}
