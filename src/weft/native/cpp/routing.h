// The choice of experts by a router's scores.
#pragma once

#include "numbers.h"

// The `top_k` of `count` experts with the highest scores, those of equal scores in the order of their numbers, and
// their shares: the softmax over all scores, or, if `normalised`, over those of the chosen experts.
inline void choose_experts(const float *scores, int64_t count, int64_t top_k, bool normalised, int64_t *chosen,
                           float *shares) {
    for (int64_t e = 0; e < count; e++) {
        float score = scores[e];
        int64_t at = std::min(e, top_k);
        if (at == top_k && !(score > shares[--at])) continue;
        for (; at > 0 && score > shares[at - 1]; at--) {
            shares[at] = shares[at - 1];
            chosen[at] = chosen[at - 1];
        }
        shares[at] = score;
        chosen[at] = e;
    }
    float top = shares[0], total = 0;
    if (!normalised)
        for (int64_t e = 0; e < count; e++) total += exp_moderate(scores[e] - top);
    for (int64_t k = 0; k < top_k; k++) {
        shares[k] = exp_moderate(shares[k] - top);
        if (normalised) total += shares[k];
    }
    for (int64_t k = 0; k < top_k; k++) shares[k] /= total;
}
