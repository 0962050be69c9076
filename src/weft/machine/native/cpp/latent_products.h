// Products with the projection from latents to each head's keys and values.
#pragma once

#include "latents.h"
#include "matrix.h"
#include "rows.h"
#include "team.h"

// The projection, dense: two stacks of matrices, of which those of the first head are given. Mirrored in
// machine/native/structures.py.
struct LatentProjection {
    Matrix keys, values;  // [nope_dim, rank] and [value_dim, rank] of a head
    int64_t heads, rope_dim;

    int64_t rank() const { return keys.cols; }
    int64_t nope_dim() const { return keys.rows; }
    int64_t value_dim() const { return values.rows; }
    int64_t head_dim() const { return nope_dim() + rope_dim; }
    int64_t latent_dim() const { return rank() + rope_dim; }
};

constexpr int64_t ABSORBED = 4;  // tokens that share a loaded word of weights

// Words of a panel's rows, widened: of column `c`, and of the next one if a word has two.
inline void widen_words(const float *word, float *low, float *, int64_t count) { std::memcpy(low, word, count * 4); }
inline void widen_words(const bf16 *word, float *low, float *high, int64_t count) {
    for (int64_t r = 0; r < count; r++) low[r] = widen(word[2 * r]), high[r] = widen(word[2 * r + 1]);
}

// to[n] = q[n] W for N tokens, columns [first, last) of a head's W [rows, cols]; q is padded with zeros to whole panels.
template <int N, class T>
void absorb_columns(const Matrix &w, const float *q, int64_t q_width, float *to, int64_t first, int64_t last) {
    constexpr int64_t D = DEPTH<T>;
    const int64_t size = panel_size<T>(w.cols), panels = w.panels();
    const T *data = static_cast<const T *>(w.data);
    for (int64_t c = first; c < last; c += D) {
        Wide sum[N][D] = {};
        for (int64_t p = 0; p < panels; p++) {
            const T *word = data + p * size + c * PANEL;
#pragma GCC unroll 4
            for (int64_t r = 0; r < PANEL; r += WIDE) {
                Wide part[2];
                widen_words(word + r * D, reinterpret_cast<float *>(&part[0]), reinterpret_cast<float *>(&part[1]), WIDE);
                for (int n = 0; n < N; n++)
                    for (int64_t d = 0; d < D; d++) sum[n][d] += vector_at(q + n * q_width + p * PANEL + r) * part[d];
            }
        }
        for (int n = 0; n < N; n++)
            for (int64_t d = 0; d < D && c + d < last; d++) to[n * w.cols + c + d] = sum_of(sum[n][d]);
    }
}

// Queries q [tokens, heads, nope_dim + rope_dim] of one head in the space of latents, into out [tokens, heads, rank +
// rope_dim]; columns [first, last) of the `rank` ones. Tokens are `q_stride` elements apart in q.
template <class T>
void absorb_head(const LatentProjection &p, const T *q, int64_t q_stride, int64_t tokens, T *out, int64_t head,
                 int64_t first, int64_t last) {
    Matrix w = nth<T>(p.keys, head);
    const int64_t width = w.panels() * PANEL;
    float from[ABSORBED * WIDEST_HEAD] = {}, to[ABSORBED * WIDEST_LATENT];
    for (int64_t t = 0; t < tokens; t += ABSORBED) {
        int64_t n = std::min(ABSORBED, tokens - t);
        for (int64_t i = 0; i < n; i++)
            for (int64_t d = 0; d < p.nope_dim(); d++)
                from[i * width + d] = widen(q[(t + i) * q_stride + head * p.head_dim() + d]);
        (n > 1 || w.fixed_order ? absorb_columns<ABSORBED, T> : absorb_columns<1, T>)(w, from, width, to, first, last);
        for (int64_t i = 0; i < n; i++)
            narrow_row(to + i * p.rank() + first, out + ((t + i) * p.heads + head) * p.latent_dim() + first,
                       last - first);
    }
}

constexpr int64_t ABSORBED_COLUMNS = 128;  // of a piece of work

// All queries in the space of latents, by the whole team, then then() once.
template <class T>
void absorb(Team &team, const LatentProjection &p, const T *q, int64_t q_stride, int64_t tokens, T *out, Then then) {
    int64_t pieces = (p.rank() + ABSORBED_COLUMNS - 1) / ABSORBED_COLUMNS;
    auto run = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            int64_t head = i / pieces, first = i % pieces * ABSORBED_COLUMNS;
            absorb_head(p, q, q_stride, tokens, out, head, first, std::min(first + ABSORBED_COLUMNS, p.rank()));
            if (i % pieces) continue;
            for (int64_t t = 0; t < tokens; t++)
                std::memcpy(out + (t * p.heads + head) * p.latent_dim() + p.rank(),
                            q + t * q_stride + head * p.head_dim() + p.nope_dim(), p.rope_dim * sizeof(T));
        }
    };
    team.each(p.heads * pieces, run, then);
}

// Rows of x for a product with one head's matrix: row t begins at x + t * row + head * head_step.
template <class T> struct HeadRows {
    const T *x;
    int64_t row, head_step;
};

constexpr int64_t GATHERED = 64;  // tokens whose rows are copied side by side at once

// out[t * out_row + head * out_step ...] = x[t] W^T for the matrices of a stack, panels [first, last) of all heads'.
template <class T>
void project_panels(const Matrix &stack, HeadRows<T> x, int64_t tokens, T *out, int64_t out_row, int64_t out_step,
                    int64_t first, int64_t last) {
    alignas(64) T rows[GATHERED * WIDEST_LATENT];
    alignas(64) float sums[GATHERED * PANEL];
    const int64_t cols = stack.cols, panels = stack.panels();
    for (int64_t i = first; i < last; i++) {
        int64_t head = i / panels, panel = i % panels, count = std::min(PANEL, stack.rows - panel * PANEL);
        Matrix m = nth<T>(stack, head);
        for (int64_t at = 0; at < tokens; at += GATHERED) {
            int64_t n = std::min(GATHERED, tokens - at);
            const T *from = x.x + at * x.row + head * x.head_step;
            if (n > 1)
                for (int64_t t = 0; t < n; t++) std::memcpy(rows + t * cols, from + t * x.row, cols * sizeof(T));
            const char *plain = reinterpret_cast<const char *>(n > 1 ? rows : from);
            panel_sums<T>(m, panel, plain, true, n, sums, {panel_at<T>(m, panel + 1), n, 0});
            for (int64_t t = 0; t < n; t++)
                narrow_row(sums + t * PANEL, out + (at + t) * out_row + head * out_step + panel * PANEL, count);
        }
    }
}

// Values of mixed latents [tokens, heads, rank], into out [tokens, heads * value_dim], by the team, then then() once.
template <class T>
void latent_values(Team &team, const LatentProjection &p, const T *mixed, int64_t tokens, T *out, Then then) {
    int64_t width = p.heads * p.value_dim();
    auto run = [&](int64_t first, int64_t last) {
        project_panels<T>(p.values, {mixed, p.heads * p.rank(), p.rank()}, tokens, out, width, p.value_dim(), first, last);
    };
    team.each(p.heads * p.values.panels(), run, then);
}

// Keys [count, heads, nope_dim + rope_dim] and values [count, heads, value_dim] of heads [first, first + heads) from
// latents [count, rank + rope_dim]. Values are `value_step` elements apart.
template <class T>
void expand_latents(Team &team, const LatentProjection &p, const T *latents, int64_t count, int64_t first,
                    int64_t heads, T *keys, T *values, int64_t value_step) {
    HeadRows<T> rows{latents, p.latent_dim(), 0};
    Matrix key = nth<T>(p.keys, first), value = nth<T>(p.values, first);
    team.each(heads * key.panels(), [&](int64_t from, int64_t to) {
        project_panels(key, rows, count, keys, heads * p.head_dim(), p.head_dim(), from, to);
    });
    team.each(heads * value.panels(), [&](int64_t from, int64_t to) {
        project_panels(value, rows, count, values, heads * value_step, value_step, from, to);
    });
    team.each(count, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++)
            for (int64_t head = 0; head < heads; head++)
                std::memcpy(keys + (i * heads + head) * p.head_dim() + p.nope_dim(), latents + i * p.latent_dim() + p.rank(),
                            p.rope_dim * sizeof(T));
    });
}

// Latents of one layer: the norm of their first `rank` values and the rotation of the others, see `LatentKernels`.
template <class T> struct LatentRows {
    int64_t heads, rank, rope_dim, nope_dim;
    const T *norm;
    float eps;
    bool interleaved;

    int64_t width() const { return rank + rope_dim; }
    int64_t head_dim() const { return nope_dim + rope_dim; }

    // Rotate `from` by a row of angles into `to`, which may be the same.
    void turn(const T *from, T *to, const float *angles) const {
        if (!interleaved) return rotate_head(from, to, angles, rope_dim);
        int64_t half = rope_dim / 2;
        T pairs[WIDEST_HEAD];
        for (int64_t i = 0; i < half; i++) pairs[i] = from[2 * i], pairs[half + i] = from[2 * i + 1];
        rotate_head(pairs, to, angles, rope_dim);
    }

    // Rotate one token's queries in place, and write its latent to its place in the cache.
    void run(T *q, const T *latent, T *stored, const float *angles) const {
        norm_row<T>(latent, nullptr, norm, stored, rank, eps);
        turn(latent + rank, stored + rank, angles);
        for (int64_t head = 0; head < heads; head++) {
            T *part = q + head * head_dim() + nope_dim;
            turn(part, part, angles);
        }
    }
};
