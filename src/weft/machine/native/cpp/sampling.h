// Sampling: a token for each row of logits, without sorting them. ranks/kernels/random.py explains the race that draws a
// token, and ranks/kernels/plain/sampling.py the filters, each of which is a threshold.
#pragma once

#include <cmath>

#include "places.h"
#include "settings.h"
#include "team.h"

// The settings of one request: COLUMNS of ranks/kernels/sampling.py, which compares the names.
#define SAMPLING_SETTINGS(COLUMN) COLUMN(temperature) COLUMN(log_min_p) COLUMN(top_k) COLUMN(top_p)
#define FIELD(NAME) double NAME;
#define NAME_OF(NAME) #NAME " "
struct SamplingSettings {
    SAMPLING_SETTINGS(FIELD)
};
constexpr char SETTING_NAMES[] = SAMPLING_SETTINGS(NAME_OF);  // with a space behind each
#undef FIELD
#undef NAME_OF

constexpr int64_t NUCLEUS = 64;  // tokens: more than top-p keeps of most rows

// Number `index` of a random stream, exponentially distributed: see `exponentials` of ranks/kernels/random.py.
inline double time_of(uint64_t stream, uint64_t index) {
    uint64_t x = stream + (index + 1) * SPLITMIX_STEP;
    x = (x ^ x >> 30) * SPLITMIX_FIRST;
    x = (x ^ x >> 27) * SPLITMIX_SECOND;
    x = (x ^ x >> 31) >> 12;
    return -std::log((double(x) + 0.5) * 0x1p-52);
}

// The weight of the logit x at a place: e^((x - best) / temperature).
struct Weigher {
    float best, temperature;

    float operator()(int32_t place) const {
        float x = (number(place) - best) / temperature;
        return x > -87.0f ? exp_moderate(x) : 0.0f;
    }
};

// Sum of the weights of places from `floor` up.
inline float weigh(const int32_t *places, int64_t count, int32_t floor, Weigher weight) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        float w = weight(places[i]);
        sum += places[i] >= floor ? w : 0.0f;
    }
    return sum;
}

// Buckets of tokens of about the same weight, the greatest weights first; their borders are a factor of e^(1 / FINE)
// apart.
constexpr int64_t FINE = 32, BUCKETS = 87 * FINE + 1;

inline void find_buckets(const int32_t *places, int64_t count, Weigher weight, int32_t *buckets, float *weights) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float x = (weight.best - number(places[i])) / weight.temperature;
        buckets[i] = int32_t((x < 87.0f ? x : 87.0f) * FINE);
        weights[i] = weight(places[i]);
    }
}

// Samples one row at a time.
class RowSampler {
    std::vector<int32_t> places, tops, selected;  // of all tokens, the highest of each block, and a selection
    std::vector<float> sums;                  // of each block's weights
    int64_t vocab, blocks;
    Weigher weight;

    int64_t members(int64_t block) const { return std::min(SAMPLING_BLOCK, vocab - block * SAMPLING_BLOCK); }

    // The first of the tokens with the highest logit.
    int64_t greedy(int32_t best) const {
        int64_t block = std::find(tops.begin(), tops.end(), best) - tops.begin();
        return std::find(places.begin() + block * SAMPLING_BLOCK, places.end(), best) - places.begin();
    }

    // Select all places from `low` up.
    void select(int32_t low) {
        selected.resize(vocab);
        int64_t count = 0;
        for (int64_t b = 0; b < blocks; b++)
            if (tops[b] >= low)
                for (int64_t i = b * SAMPLING_BLOCK; i < b * SAMPLING_BLOCK + members(b); i++) {
                    selected[count] = places[i];
                    count += places[i] >= low;
                }
        selected.resize(count);
    }

    // The k-th highest place.
    int32_t kth(int64_t k) {
        select(reached_by(k, tops, selected));
        std::nth_element(selected.begin(), selected.begin() + k - 1, selected.end(), std::greater<>());
        return selected[k - 1];
    }

    // Add up the weights of the selected places, the greatest first. Returns true if the sum reaches `goal`; `last` is
    // the last place that was added.
    bool reach(double goal, int32_t &last) {
        auto first = selected.begin(), stop = selected.end();
        double sum = 0;
        while (stop - first > NUCLEUS) {
            auto middle = first + (stop - first) / 2;
            std::nth_element(first, middle, stop, std::greater<>());
            double half = weigh(&*first, middle - first, LOWEST_PLACE, weight);
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

    // Add up the weights of places from `floor` up by buckets, the greatest first, and select the places of the bucket
    // with which the sum reaches `goal`. Returns the goal less the weights of the buckets before that one.
    double narrow_down(double goal, int32_t floor) {
        int32_t buckets[SAMPLING_BLOCK];
        float weights[SAMPLING_BLOCK];
        std::vector<double> mass(BUCKETS);
        auto each_token = [&](auto visit) {
            for (int64_t b = 0; b < blocks; b++) {
                if (tops[b] < floor) continue;
                const int32_t *at = &places[b * SAMPLING_BLOCK];
                find_buckets(at, members(b), weight, buckets, weights);
                for (int64_t i = 0; i < members(b); i++)
                    if (at[i] >= floor) visit(at[i], buckets[i], weights[i]);
            }
        };
        each_token([&](int32_t, int32_t bucket, float weight) { mass[bucket] += weight; });
        int64_t which = 0;
        for (; which < BUCKETS - 1 && mass[which] < goal; which++) goal -= mass[which];
        selected.clear();
        each_token([&](int32_t place, int32_t bucket, float) {
            if (bucket == which) selected.push_back(place);
        });
        return goal;
    }

    // Add up the weights of places from `floor` up for each block; return the sum of all.
    double weigh_blocks(int32_t floor) {
        double total = 0;
        for (int64_t b = 0; b < blocks; b++) {
            sums[b] = tops[b] >= floor ? weigh(&places[b * SAMPLING_BLOCK], members(b), floor, weight) : 0;
            total += sums[b];
        }
        return total;
    }

    // The lowest place that the filters keep.
    int32_t floor_of(const SamplingSettings &settings) {
        int32_t floor = LOWEST_PLACE;
        if (settings.log_min_p > -std::numeric_limits<double>::infinity())
            floor = place(weight.best + weight.temperature * float(settings.log_min_p));
        if (settings.top_k > 0 && settings.top_k < double(vocab)) floor = std::max(floor, kth(int64_t(settings.top_k)));
        if (settings.top_p < 1) {
            double goal = weigh_blocks(floor) * settings.top_p;
            int32_t low = std::max(floor, reached_by(NUCLEUS, tops, selected)), last = low;
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

    // Draw a block, then a token of it: the one with the greatest weight for its random time.
    int64_t race(uint64_t stream, int32_t floor) const {
        double most = 0;
        int64_t block = 0, token = 0;
        for (int64_t b = 0; b < blocks; b++) {
            double speed = sums[b] > 0 ? double(sums[b]) / time_of(stream, b) : 0;
            if (speed > most) most = speed, block = b;
        }
        most = 0;
        for (int64_t i = 0; i < members(block); i++) {
            int32_t at = places[block * SAMPLING_BLOCK + i];
            float w = at >= floor ? weight(at) : 0.0f;
            double speed = w > 0 ? double(w) / time_of(stream, blocks + i) : 0;
            if (speed > most) most = speed, token = block * SAMPLING_BLOCK + i;
        }
        return token;
    }

public:
    template <class T> void read_row(const T *logits, int64_t count) {
        vocab = count, blocks = (vocab + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK;
        places.resize(vocab), tops.resize(blocks), sums.resize(blocks);
        for (int64_t b = 0; b < blocks; b++)
            tops[b] = find_places(logits + b * SAMPLING_BLOCK, members(b), &places[b * SAMPLING_BLOCK]);
    }

    // The token of the row that was read.
    int64_t token(const SamplingSettings &settings, uint64_t stream) {
        int32_t best = *std::max_element(tops.begin(), tops.end());
        if (best >= INFINITE || best <= NEVER) return NOT_FINITE;
        if (settings.temperature == 0) return greedy(best);
        weight = {number(best), float(settings.temperature)};
        int32_t floor = floor_of(settings);
        weigh_blocks(floor);
        return race(stream, floor);
    }
};

// Sample tokens [rows] from logits [rows, vocab], whose rows are `stride` apart, each by its settings and with its
// random stream. Logits of `size` 2 are bf16, others float: edited logits are, whatever the dtype of activations.
inline void sample(const void *logits, int64_t size, int64_t rows, int64_t vocab, int64_t stride,
                   const SamplingSettings *settings, const uint64_t *streams, int64_t *tokens, int64_t threads) {
    auto sample_rows = [&](int64_t first, int64_t last) {
        static thread_local RowSampler sampler;  // its memory is kept for the next step
        for (int64_t r = first; r < last; r++) {
            if (size == 2)
                sampler.read_row(static_cast<const bf16 *>(logits) + r * stride, vocab);
            else
                sampler.read_row(static_cast<const float *>(logits) + r * stride, vocab);
            tokens[r] = sampler.token(settings[r], streams[r]);
        }
    };
    together(threads, rows > 1, [&](Team &team) { team.each(rows, 1, sample_rows, nothing); });
}
