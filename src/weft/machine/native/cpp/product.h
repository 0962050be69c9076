// A product by a team of threads.
#pragma once

#include <vector>

#include "matrix.h"
#include "team.h"

// Bytes of scratch that `product` needs for `tokens` tokens.
template <class T> int64_t scratch_bytes(const Matrix &m, int64_t tokens) { return tokens * prepared_bytes<T>(m); }

// Prepare rows [first, last) of x in `scratch`.
template <class T> void prepare_rows(const Matrix &m, const T *x, char *scratch, int64_t first, int64_t last) {
    if (int64_t bytes = prepared_bytes<T>(m))
        for (int64_t t = first; t < last; t++) prepare(m, x + t * m.cols, scratch + t * bytes);
}

// out = x W^T + bias, by the whole team, then then() once. Prepares x in `scratch` unless it is `prepared` there.
template <class T, class Out>
void product(Team &team, const Matrix &m, const T *x, int64_t tokens, Out *out, char *scratch, bool prepared,
             Then then) {
    if (!prepared && !reads_plain<T>(m, tokens))
        team.each(tokens, [&](int64_t first, int64_t last) { prepare_rows(m, x, scratch, first, last); });
    team.each(
        m.panels(), [&](int64_t first, int64_t last) { multiply(m, x, scratch, tokens, out, first, last); }, then);
}

// The same for a caller without a team.
template <class T, class Out> void product(const Matrix &m, const T *x, int64_t tokens, Out *out, int64_t threads) {
    std::vector<char> scratch(scratch_bytes<T>(m, tokens));
    together(threads, m.rows * m.cols * tokens > SMALL,
             [&](Team &team) { product(team, m, x, tokens, out, scratch.data(), false, nothing); });
}
