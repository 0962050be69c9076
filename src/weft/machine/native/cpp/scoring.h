// Scoring: logprobs and ranks of given tokens, and the likeliest tokens, in one pass over a row of logits, block by
// block. ranks/kernels/plain/sampling.py does the same in torch.
#pragma once

#include "places.h"
#include "team.h"

constexpr int64_t SPAN = 256;  // tokens whose logits are still in the L1 cache when they are read again

// The sum of e^(x - best) of one block, and the number of x above `target`. A function of its own, see `find_places`.
template <class T>
void weigh_and_count(const T *__restrict logits, int64_t count, float best, float target, float &weight,
                     int64_t &above) {
    float sum = 0;
    int32_t likelier = 0;
#pragma omp simd reduction(+ : sum, likelier)
    for (int64_t i = 0; i < count; i++) {
        float x = widen(logits[i]);
        sum += exp_moderate(x - best);
        likelier += x > target;
    }
    weight = sum;
    above += likelier;
}

// Scores one row at a time.
class RowScorer {
    std::vector<int32_t> tops, scratch;  // the highest place of each block
    std::vector<float> weights;          // of each block, relative to its best token
    std::vector<int64_t> keys;

    // The logarithm of the sum of e^x over the row.
    double log_sum() const {
        float best = number(*std::max_element(tops.begin(), tops.end()));
        if (!std::isfinite(best)) return best;
        double sum = 0;
        for (size_t b = 0; b < tops.size(); b++) sum += double(weights[b]) * exp_moderate(number(tops[b]) - best);
        return best + std::log(sum);
    }

    // Keys of the `count` likeliest tokens, best first. A key has the place in its upper bits, and in its lower ones a
    // number that is larger for lower ids.
    template <class T> void find_likeliest(const T *logits, int64_t vocab, int64_t count) {
        int32_t low = reached_by(count, tops, scratch), places[SPAN];
        keys.clear();
        for (size_t b = 0; b < tops.size(); b++) {
            if (tops[b] < low) continue;
            int64_t first = b * SPAN, members = std::min(SPAN, vocab - first);
            find_places(logits + first, members, places);
            for (int64_t i = 0; i < members; i++)
                if (places[i] >= low) keys.push_back(int64_t(places[i]) * (int64_t(1) << 32) + (vocab - 1 - first - i));
        }
        std::partial_sort(keys.begin(), keys.begin() + count, keys.end(), std::greater<>());
    }

public:
    // Score one row into `out`, see `score` below.
    template <class T> void row(const T *logits, int64_t vocab, int64_t token, int64_t top, double *out) {
        int64_t blocks = (vocab + SPAN - 1) / SPAN, above = 0;
        int32_t places[SPAN];  // computed again for the few blocks that matter
        tops.resize(blocks), weights.resize(blocks);
        float target = widen(logits[token]);
        for (int64_t b = 0; b < blocks; b++) {
            const T *from = logits + b * SPAN;
            int64_t members = std::min(SPAN, vocab - b * SPAN);
            tops[b] = find_places(from, members, places);
            weights[b] = 0;
            if (tops[b] > NEVER) weigh_and_count(from, members, number(tops[b]), target, weights[b], above);
        }
        double total = log_sum();
        *out++ = target - total;
        *out++ = double(above + 1);
        if (!top) return;
        find_likeliest(logits, vocab, top);
        for (int64_t i = 0; i < top; i++) {
            out[i] = double(vocab - 1 - (keys[i] & UINT32_MAX));
            out[top + i] = number(int32_t(keys[i] >> 32)) - total;
        }
    }
};

// Score tokens [rows] by logits [rows, vocab], whose rows are `stride` apart, into out [rows, 2 + 2 * top]: each
// token's logprob and rank, the ids of the `top` likeliest tokens (at most vocab), and their logprobs. `size` is as in
// `sample`.
inline void score(const void *logits, int64_t size, int64_t rows, int64_t vocab, int64_t stride, const int64_t *tokens,
                  int64_t top, double *out, int64_t threads) {
    auto score_rows = [&](int64_t first, int64_t last) {
        static thread_local RowScorer scorer;  // its memory is kept for the next step
        for (int64_t r = first; r < last; r++) {
            double *to = out + r * (2 + 2 * top);
            if (size == 2)
                scorer.row(static_cast<const bf16 *>(logits) + r * stride, vocab, tokens[r], top, to);
            else
                scorer.row(static_cast<const float *>(logits) + r * stride, vocab, tokens[r], top, to);
        }
    };
    together(threads, rows > 1, [&](Team &team) { team.each(rows, 1, score_rows, nothing); });
}
