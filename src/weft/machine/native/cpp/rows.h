// Operations on one token's row between the products: RMS norm, SiLU, rotary embedding.
#pragma once

#include "numbers.h"
#include "paged.h"

template <class T>
[[gnu::noinline]] void norm_row(const T *x, T *residual, const T *weight, T *out, int64_t width, float eps) {
    const T *source = x;
    if (residual) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) residual[i] = narrow<T>(widen(residual[i]) + widen(x[i]));
        source = residual;
    }
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; i++) squares += widen(source[i]) * widen(source[i]);
    float scale = 1.0f / std::sqrt(squares / float(width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++)
        // Rounded before the weight, as the models were trained.
        out[i] = narrow<T>(widen(narrow<T>(widen(source[i]) * scale)) * widen(weight[i]));
}

template <class T> [[gnu::noinline]] void silu_mul_row(const T *gate, const T *up, T *out, int64_t width) {
    constexpr int64_t PIECE = 256;
    alignas(64) float piece[PIECE];
    for (int64_t at = 0; at < width; at += PIECE) {
        int64_t count = std::min(PIECE, width - at);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            float g = widen(gate[at + i]);
            piece[i] = g / (1.0f + exp_moderate(-g)) * widen(up[at + i]);
        }
        narrow_row(piece, out + at, count);
    }
}

// Rotate one head by a row of the table: head_dim/2 cosines, then as many sines. `from` may be `to`.
template <class T> void rotate_head(const T *from, T *to, const float *table, int64_t head_dim) {
    int64_t half = head_dim / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = widen(from[i]), b = widen(from[i + half]), c = table[i], s = table[i + half];
        to[i] = narrow<T>(a * c - b * s);
        to[i + half] = narrow<T>(b * c + a * s);
    }
}

// A layer's heads for `rotate`. Weights of norms are null if the model has none.
template <class T> struct Heads {
    int64_t q_heads, kv_heads, head_dim;
    const T *q_norm, *k_norm;
    float eps;

    int64_t width() const { return (q_heads + 2 * kv_heads) * head_dim; }
};

// Rotate one token's row of q, k and v. The heads of q are written to `q`, which may be the row itself;
// `store(head, key, value)` is called for each KV head.
template <class T, class Store>
void rotate(const Heads<T> &h, const T *row, T *q, const float *angles, const Store &store) {
    T key[WIDEST_HEAD];
    for (int64_t head = 0; head < h.q_heads + h.kv_heads; head++) {
        bool query = head < h.q_heads;
        const T *from = row + head * h.head_dim, *weight = query ? h.q_norm : h.k_norm;
        T *to = query ? q + head * h.head_dim : key;
        if (weight) {
            norm_row<T>(from, nullptr, weight, to, h.head_dim, h.eps);
            from = to;
        }
        rotate_head(from, to, angles, h.head_dim);
        if (!query) store(head - h.q_heads, key, row + (head + h.kv_heads) * h.head_dim);
    }
}
