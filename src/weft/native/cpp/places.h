// Places: logits are compared by integers in the order of the floats: -0 and 0 have the same one, and NaN, which greedy
// takes for the greatest, the highest.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "numbers.h"

constexpr int32_t LOWEST = std::numeric_limits<int32_t>::min(), HIGHEST = std::numeric_limits<int32_t>::max();
constexpr int32_t INFINITE = 0x7f800000, NEVER = -1 - INFINITE;  // the places of infinity and of -infinity

inline int32_t place(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    // Without branches, or no compiler would vectorise it.
    bits &= -int32_t(bits != LOWEST);
    int32_t nan = -int32_t((bits & HIGHEST) > INFINITE);
    return ((bits ^ (bits >> 31 & HIGHEST)) & ~nan) | (nan & HIGHEST);
}

inline float number(int32_t place) {
    int32_t bits = place ^ (place >> 31 & HIGHEST);
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Places of logits, and the highest of them. In a function of its own, with nothing in sight that could be changed by a
// store, so that the loop is vectorised.
template <class T> int32_t find_places(const T *__restrict logits, int64_t count, int32_t *__restrict places) {
    int32_t top = LOWEST;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; i++) {
        int32_t at = place(widen(logits[i]));
        places[i] = at;
        top = at > top ? at : top;
    }
    return top;
}

// A place that at least `count` tokens have reached, since the highest of so many blocks, `tops`, have; or the lowest.
inline int32_t reached_by(int64_t count, const std::vector<int32_t> &tops, std::vector<int32_t> &scratch) {
    if (count > int64_t(tops.size())) return LOWEST;
    scratch = tops;
    std::nth_element(scratch.begin(), scratch.begin() + count - 1, scratch.end(), std::greater<>());
    return scratch[count - 1];
}
