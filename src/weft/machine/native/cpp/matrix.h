// Matrices: weights that do not change any more, each packed once for its product out = x W^T + bias.
//
// Every scheme packs in panels of PANEL output rows. A thread's share of a product is then a range of panels, which it
// reads from memory in sequence. A scheme has to offer the functions at the end of this file.
#pragma once

#include "dense.h"
#include "dequantised.h"
#include "float8.h"
#include "numbers.h"
#include "quantised.h"

// Mirrored in machine/native/structures.py.
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
    int64_t fixed_order;  // one order of sums whatever the number of tokens

    int64_t panels() const { return (rows + PANEL - 1) / PANEL; }
    int64_t blocks() const { return cols / BLOCK; }
    Packed packed() const {
        auto bytes = [](const void *at) { return static_cast<const char *>(at); };
        return {bytes(data), bytes(scales), bytes(lowest), kind, {blocks(), group / BLOCK, lacking / BLOCK}};
    }
    int64_t per_block() const { return group < BLOCK ? 2 : 1; }  // groups in a block, see quantised.h
    bool dense() const { return !bits; }
    bool wide() const { return bits && kind >= Lowest::FP8; }  // multiplied as floats, see float8.h
};

// Call work() with the coding of a quantised matrix.
template <class Function> void with_coding(const Matrix &m, const Function &work) {
    if (m.kind == Lowest::FP8) return work(Float8());
    if (m.kind == Lowest::SIGNED) return work(SignedOctets());
    if (m.kind == Lowest::NF4) return work(NormalFloats());
    if (m.kind == Lowest::FP4) return work(Float4());
    if (m.bits == 8) return work(Octets());
    if (m.kind == Lowest::MXFP4) return work(Floats());
    if (m.kind == Lowest::NESTED) return work(Nested());
    if (m.per_block() == 2) return work(HalfBlocks());
    work(Nibbles());
}

// Bytes of one token's row of x once it is prepared for a product; 0 if the product reads x itself.
template <class T> int64_t prepared_bytes(const Matrix &m) {
    if (m.wide()) return float8_row_bytes(m.cols);
    return m.dense() ? 0 : Row::bytes(m.blocks(), m.per_block());
}

// Prepare one token's row of x: its integers and sums, or its floats if the product is `wide`. Called once per token, before the
// product.
template <class T> void prepare(const Matrix &m, const T *x, char *to) {
    if (m.wide()) return float8_row(x, m.cols, m.kind == Lowest::FP8 ? FACTOR<Float8> : 1.0f, to);
    if (!m.dense()) quantise_row(x, m.blocks(), m.per_block(), to);
}

// The address of panel p of W.
template <class T> const char *panel_at(const Matrix &m, int64_t p) {
    int64_t bytes = m.dense() ? panel_size<T>(m.cols) * int64_t(sizeof(T)) : m.cols * PANEL * m.bits / 8;
    return static_cast<const char *>(m.data) + p * bytes;
}

// Matrix `i` of a stack of matrices that lie one after the other, of which `first` is the first.
template <class T> Matrix nth(Matrix first, int64_t i) {
    auto skip = [&](const void *&part, int64_t bytes) {
        if (part) part = static_cast<const char *>(part) + i * bytes;
    };
    Packed packed = first.packed();
    int64_t numbers = first.dense() ? 0 : first.panels() * packed.columns.groups() * PANEL;
    skip(first.data, panel_at<T>(first, first.panels()) - panel_at<T>(first, 0));
    skip(first.scales, numbers * packed.scale_bytes());
    skip(first.lowest, numbers * packed.lowest_bytes());
    skip(first.bias, first.rows * int64_t(sizeof(T)));
    return first;
}

constexpr int64_t BATCH = 384;  // tokens whose sums with a panel are kept at once

// True if a product of so many tokens reads rows of x as they are, not what `prepare` makes of them.
template <class T> bool reads_plain(const Matrix &m, int64_t tokens) {
#ifdef WEFT_AMX
    if (sizeof(T) == 2 && tokens >= DEQUANTISED_FROM && amx_allowed()) return true;
#endif
    return m.dense();
}

// Bytes of one token's row as a product reads it.
template <class T> int64_t row_bytes(const Matrix &m, bool plain) {
    return plain ? m.cols * int64_t(sizeof(T)) : prepared_bytes<T>(m);
}

// Sums of `tokens` rows of x, plain or prepared, with panel p of W: [tokens][PANEL].
template <class T>
void panel_sums(const Matrix &m, int64_t p, const char *x, bool plain, int64_t tokens, float *sums, Ahead ahead) {
    const char *panel = panel_at<T>(m, p);
    if (m.dense())
        return dense_sums(reinterpret_cast<const T *>(panel), reinterpret_cast<const T *>(x), m.cols, tokens, sums,
                          ahead, m.fixed_order);
    with_coding(m, [&](auto coding) {
        using C = decltype(coding);
        Packed packed = m.packed().template panel<C::BITS>(p);
#ifdef WEFT_AMX
        if constexpr (sizeof(T) == 2)
            if (plain) return dequantised_sums<C>(packed, reinterpret_cast<const T *>(x), tokens, sums);
#endif
        if constexpr (C::WIDE)
            float8_sums<C>(packed, x, tokens, sums, m.fixed_order);
        else
            quantised_sums<C>(packed, x, tokens, sums, ahead);
    });
}

// sums += the bias of panel p's rows, for every token; of `count` rows, since the last panel may have fewer.
template <class T> void add_bias(const Matrix &m, int64_t p, int64_t tokens, float *sums, int64_t count) {
    if (!m.bias) return;
    const T *bias = static_cast<const T *>(m.bias) + p * PANEL;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < count; r++) sums[t * PANEL + r] += widen(bias[r]);
}

// Rows of x, of `bytes` each, that all panels of a piece of work are multiplied with before others.
inline int64_t nearby_rows(int64_t bytes) { return std::max<int64_t>(8 * TOKENS, CACHED / bytes); }

// out[t][r] = x[t] . W[r] + bias[r] for every token and the rows of panels [first, last). x is [tokens, cols];
// `prepared` holds its rows as `prepare` wrote them, unless the product `reads_plain` ones; out is [tokens, rows] of T
// or float. Runs in the calling thread.
template <class T, class Out>
void multiply(const Matrix &m, const T *x, const char *prepared, int64_t tokens, Out *out, int64_t first,
              int64_t last) {
    bool plain = reads_plain<T>(m, tokens);
    const char *from = plain ? reinterpret_cast<const char *>(x) : prepared;
    int64_t stride = row_bytes<T>(m, plain);
    alignas(64) float sums[BATCH * PANEL];
    const int64_t near = nearby_rows(stride);
    for (int64_t begin = 0; begin < tokens; begin += near) {
        int64_t end = std::min(begin + near, tokens);
        for (int64_t p = first; p < last; p++) {
            int64_t row = p * PANEL, count = std::min(PANEL, m.rows - row);
            for (int64_t at = begin; at < end; at += BATCH) {
                int64_t n = std::min(BATCH, end - at);
                panel_sums<T>(m, p, from + at * stride, plain, n, sums, {panel_at<T>(m, p + 1), end - begin, at - begin});
                add_bias<T>(m, p, n, sums, count);
                for (int64_t t = 0; t < n; t++) narrow_row(sums + t * PANEL, out + (at + t) * m.rows + row, count);
            }
        }
    }
}

// Rows of W, dequantised: out [count, cols].
template <class T> void rows_of(const Matrix &m, const int64_t *rows, int64_t count, T *out) {
    for (int64_t i = 0; i < count; i++, out += m.cols)
        if (m.dense())
            dense_row(static_cast<const T *>(m.data), rows[i], m.cols, out);
        else
            with_coding(m, [&](auto coding) { row_of<decltype(coding)>(m.packed(), rows[i], out); });
}
