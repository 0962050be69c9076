// The choice of experts by a router's scores.
#pragma once

#include <vector>

#include "numbers.h"

// How a token's experts are chosen, see `Experts` of checkpoint/architectures/shape.py. Mirrored in machine/native/structures.py.
struct Routing {
    int64_t top_k, normalised, sigmoid, groups, top_groups;
    int64_t group_best;       // weights of a group whose sum is the group's
    const float *correction;  // [experts], or null
    float scaling;

    // True if the highest scores of all experts are chosen, and their weights are a softmax.
    bool plain() const { return !sigmoid && groups <= 1 && !correction && scaling == 1.0f; }
};

// Insert number `e` into the best `top_k` ones, in the order of their values and then of their numbers, of which there
// are `had`.
inline void insert_best(float value, int64_t e, int64_t had, int64_t top_k, int64_t *chosen, float *values) {
    int64_t at = std::min(had, top_k);
    if (at == top_k && !(value > values[--at])) return;
    for (; at > 0 && value > values[at - 1]; at--) {
        values[at] = values[at - 1];
        chosen[at] = chosen[at - 1];
    }
    values[at] = value;
    chosen[at] = e;
}

// The `top_k` of `count` experts with the highest scores, those of equal scores in the order of their numbers, and
// their shares: the softmax over all scores, or, if `normalised`, over those of the chosen experts.
inline void choose_plainly(const float *scores, int64_t count, int64_t top_k, bool normalised, int64_t *chosen,
                           float *shares) {
    for (int64_t e = 0; e < count; e++) insert_best(scores[e], e, e, top_k, chosen, shares);
    float top = shares[0], total = 0;
    if (!normalised)
        for (int64_t e = 0; e < count; e++) total += exp_moderate(scores[e] - top);
    for (int64_t k = 0; k < top_k; k++) {
        shares[k] = exp_moderate(shares[k] - top);
        if (normalised) total += shares[k];
    }
    for (int64_t k = 0; k < top_k; k++) shares[k] /= total;
}

// Weights of all experts: a softmax, or sigmoids.
inline void weigh_experts(const float *scores, int64_t count, bool sigmoid, float *weights) {
    // In whole vectors: what is left over would be rounded in another way, and equal scores get unequal weights.
    constexpr int64_t PIECE = 16;
    float top = 0, total = 0;
    if (!sigmoid) top = *std::max_element(scores, scores + count);
    for (int64_t at = 0; at < count; at += PIECE) {
        int64_t n = std::min(PIECE, count - at);
        float piece[PIECE] = {};
        std::memcpy(piece, scores + at, n * sizeof(float));
        if (sigmoid)
            for (int64_t i = 0; i < PIECE; i++) piece[i] = 1.0f / (1.0f + exp_moderate(-piece[i]));
        else
            for (int64_t i = 0; i < PIECE; i++) piece[i] = exp_moderate(piece[i] - top);
        for (int64_t i = 0; i < n; i++) total += piece[i];
        std::memcpy(weights + at, piece, n * sizeof(float));
    }
    if (sigmoid) return;
    float share = 1.0f / total;
    for (int64_t e = 0; e < count; e++) weights[e] *= share;
}

constexpr int64_t MAX_GROUP_BEST = 2;

// The numbers of the best groups of experts, by their `values`, in rising order.
inline std::vector<int64_t> best_groups(const float *values, int64_t count, const Routing &r) {
    int64_t size = count / r.groups, ignored[MAX_GROUP_BEST];
    std::vector<int64_t> best(r.top_groups);
    std::vector<float> sums(r.top_groups);
    for (int64_t g = 0; g < r.groups; g++) {
        float highest[MAX_GROUP_BEST] = {}, sum = 0;
        for (int64_t e = 0; e < size; e++) insert_best(values[g * size + e], e, e, r.group_best, ignored, highest);
        for (int64_t i = 0; i < r.group_best; i++) sum += highest[i];
        insert_best(sum, g, g, r.top_groups, best.data(), sums.data());
    }
    std::sort(best.begin(), best.end());
    return best;
}

// The experts of a token and their shares.
inline void choose_experts(const float *scores, int64_t count, const Routing &r, int64_t *chosen, float *shares) {
    if (r.plain()) return choose_plainly(scores, count, r.top_k, r.normalised, chosen, shares);
    std::vector<float> weights(2 * count);
    float *values = weights.data() + count, total = 0;
    weigh_experts(scores, count, r.sigmoid, weights.data());
    for (int64_t e = 0; e < count; e++) values[e] = weights[e] + (r.correction ? r.correction[e] : 0.0f);
    std::vector<int64_t> groups{0};
    if (r.groups > 1) groups = best_groups(values, count, r);
    int64_t size = count / r.groups, had = 0;
    for (int64_t g : groups)
        for (int64_t e = g * size; e < (g + 1) * size; e++) insert_best(values[e], e, had++, r.top_k, chosen, shares);
    for (int64_t k = 0; k < r.top_k; k++) total += shares[k] = weights[chosen[k]];
    float factor = r.normalised ? r.scaling / (total + 1e-20f) : r.scaling;
    for (int64_t k = 0; k < r.top_k; k++) shares[k] *= factor;
}
