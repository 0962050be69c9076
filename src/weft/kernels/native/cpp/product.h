// A whole product by a team.
#pragma once

#include <vector>

#include "matrix.h"
#include "team.h"

constexpr int64_t MANY = 64;   // tokens from which on a product is bound by arithmetic, not by memory
constexpr int64_t PIECES = 8;  // of such a product, per thread

// Bytes of scratch that `product` wants for so many tokens.
template <class T> int64_t scratch_bytes(const Matrix &m, int64_t tokens) { return tokens * prepared_bytes<T>(m); }

// out = x W^T + bias, by the whole team; what comes after it meets first.
template <class T, class Out>
void product(const Team &team, const Matrix &m, const T *x, int64_t tokens, Out *out, char *scratch) {
    if (int64_t bytes = prepared_bytes<T>(m)) {
        Range mine = team.share(tokens);
        for (int64_t t = mine.first; t < mine.last; t++) prepare(m, x + t * m.cols, scratch + t * bytes);
        team.meet();
    }
    int64_t panels = m.panels();
    if (tokens < MANY) {
        // One range of memory each, read in one go.
        Range mine = team.share(panels);
        return multiply(m, x, scratch, tokens, out, mine.first, mine.last);
    }
    // Nobody waits long for a thread whose core is not its own.
    int64_t grain = std::max<int64_t>(1, panels / (PIECES * team.size));
    for (int64_t at; (at = team.take(grain)) < panels;)
        multiply(m, x, scratch, tokens, out, at, std::min(at + grain, panels));
}

// The same, for a caller who has no team.
template <class T, class Out> void product(const Matrix &m, const T *x, int64_t tokens, Out *out) {
    std::vector<char> scratch(scratch_bytes<T>(m, tokens));
    together(m.rows * m.cols * tokens > SMALL,
             [&](const Team &team) { product(team, m, x, tokens, out, scratch.data()); });
}
