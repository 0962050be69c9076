// Matrices: weights that do not change any more, each packed once for its product out = x W^T + bias.
//
// Every scheme packs in panels of PANEL output rows. A thread's share of a product is then a range of panels, which it
// reads from memory in sequence. A scheme has to offer the functions at the end of this file.
#pragma once

#include "dense.h"
#include "numbers.h"
#include "quantised.h"

// Mirrored in native/structures.py.
struct Matrix {
    int64_t bits;        // 4 or 8; 0 if the weights are not quantised
    int64_t rows, cols;  // output features, input features
    const void *data;    // packed as the scheme wants, padded to whole panels
    const void *scales;  // null if the scheme has none, as is `lowest`
    const void *lowest;
    const void *bias;  // rows of T, or null
    int64_t group;     // columns that share a scale
    int64_t lacking;   // columns that the first group lacks
    Lowest kind;

    int64_t panels() const { return (rows + PANEL - 1) / PANEL; }
    int64_t blocks() const { return cols / BLOCK; }
    Packed packed() const {
        auto bytes = [](const void *at) { return static_cast<const char *>(at); };
        return {bytes(data), bytes(scales), bytes(lowest), kind, {blocks(), group / BLOCK, lacking / BLOCK}};
    }
    int64_t per_block() const { return group < BLOCK ? 2 : 1; }  // groups in a block, see quantised.h
    bool dense() const { return !bits; }
};

// Bytes of one token's row of x once it is prepared for a product; 0 if the product reads x itself.
template <class T> int64_t prepared_bytes(const Matrix &m) {
    return m.dense() ? 0 : Row::bytes(m.blocks(), m.per_block());
}

// Prepare one token's row of x (its integers and sums). Called once per token, before the product.
template <class T> void prepare(const Matrix &m, const T *x, char *to) {
    if (!m.dense()) quantise_row(x, m.blocks(), m.per_block(), to);
}

// out[t][r] = x[t] . W[r] + bias[r] for every token and the rows of panels [first, last). x is [tokens, cols];
// `prepared` holds its rows as `prepare` wrote them; out is [tokens, rows] of T or float. Runs in the calling thread.
template <class T, class Out>
void multiply(const Matrix &m, const T *x, const char *prepared, int64_t tokens, Out *out, int64_t first,
              int64_t last) {
    const T *bias = static_cast<const T *>(m.bias);
    if (m.dense()) return dense(static_cast<const T *>(m.data), bias, m.rows, m.cols, x, tokens, out, first, last);
    auto product = m.bits == 8            ? quantised<8, 1, T, Out>
                   : m.per_block() == 2 ? quantised<4, 2, T, Out>
                                        : quantised<4, 1, T, Out>;
    product(m.packed(), bias, m.rows, prepared, tokens, out, first, last);
}

// Rows of W, dequantised: out [count, cols].
template <class T> void rows_of(const Matrix &m, const int64_t *rows, int64_t count, T *out) {
    for (int64_t i = 0; i < count; i++, out += m.cols)
        if (m.dense())
            dense_row(static_cast<const T *>(m.data), rows[i], m.cols, out);
        else
            (m.bits == 4 ? row_of<4, T> : row_of<8, T>)(m.packed(), rows[i], out);
}
