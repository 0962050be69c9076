// Places: integers that are ordered as the floats are, by which logits are compared. -0 and 0 have the same place. NaN,
// which greedy sampling takes for the greatest, has the highest one.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "numbers.h"

constexpr int32_t LOWEST_PLACE = std::numeric_limits<int32_t>::min();
constexpr int32_t HIGHEST_PLACE = std::numeric_limits<int32_t>::max();
constexpr int32_t INFINITE = 0x7f800000, NEVER = -1 - INFINITE;  // the places of infinity and of -infinity

inline int32_t place(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    // Without branches, or no compiler would vectorise this.
    bits &= -int32_t(bits != LOWEST_PLACE);
    int32_t nan = -int32_t((bits & HIGHEST_PLACE) > INFINITE);
    return ((bits ^ (bits >> 31 & HIGHEST_PLACE)) & ~nan) | (nan & HIGHEST_PLACE);
}

inline float number(int32_t place) {
    int32_t bits = place ^ (place >> 31 & HIGHEST_PLACE);
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Write the places of logits; return the highest. A function of its own, in which no store can change anything else
// that is read, so that the loop is vectorised.
template <class T> int32_t find_places(const T *__restrict logits, int64_t count, int32_t *__restrict places) {
    int32_t top = LOWEST_PLACE;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; i++) {
        int32_t at = place(widen(logits[i]));
        places[i] = at;
        top = at > top ? at : top;
    }
    return top;
}

// A place that at least `count` tokens reach, because the highest places of that many blocks, of `tops`, do. The lowest
// place if there are fewer blocks.
inline int32_t reached_by(int64_t count, const std::vector<int32_t> &tops, std::vector<int32_t> &scratch) {
    if (count > int64_t(tops.size())) return LOWEST_PLACE;
    scratch = tops;
    std::nth_element(scratch.begin(), scratch.begin() + count - 1, scratch.end(), std::greater<>());
    return scratch[count - 1];
}
