// Attention in plain loops over a KV cache in the layout [block, position, head, head_dim].
#pragma once

#include <limits>

#include "numbers.h"
#include "paged.h"
#include "wide.h"

constexpr int64_t LINE = 64;   // bytes of a cache line
constexpr int64_t ROWS = 6;    // queries that share a loaded vector of keys or values
constexpr int64_t FEW = 16;    // queries: with fewer, transposing the keys does not pay

constexpr int64_t PAIR = 2 * WIDE;  // floats that a loop over vectors takes at once

// scores[q][j] = queries[q] . keys[:, j] for N queries; rows of queries are `padded` long.
template <int64_t N>
void score_strip(const float *queries, const float *keys, float *scores, int64_t head_dim, int64_t padded) {
    for (int64_t j = 0; j < KEYS; j += PAIR) {
        Wide sum[N][2] = {};
        for (int64_t d = 0; d < head_dim; d++) {
            Wide low = vector_at(keys + d * KEYS + j), high = vector_at(keys + d * KEYS + j + WIDE);
#pragma GCC unroll 6
            for (int64_t q = 0; q < N; q++) {
                float query = queries[q * padded + d];
                sum[q][0] += query * low;
                sum[q][1] += query * high;
            }
        }
        for (int64_t q = 0; q < N; q++)
            for (int64_t i = 0; i < 2; i++) vector_at(scores + q * KEYS + j + i * WIDE) = sum[q][i];
    }
}

// sums[q] += sum over j of scores[q][j] * value(j) for N queries and `count` keys, V vectors of each from element `d` on;
// rows of sums are `padded` long. Keys are added in their order whatever N is, so a query gets the same bits beside others
// as alone.
template <int64_t N, int64_t V, class Value>
inline __attribute__((always_inline)) void mix_vectors(const float *scores, const Value &value, float *sums, int64_t padded,
                                                       int64_t count, int64_t d) {
    Wide sum[N][V];
    for (int64_t q = 0; q < N; q++)
        for (int64_t v = 0; v < V; v++) sum[q][v] = vector_at(sums + q * padded + d + v * WIDE);
    for (int64_t j = 0; j < count; j++) {
        Wide part[V];
#pragma GCC unroll 2
        for (int64_t v = 0; v < V; v++) part[v] = widened(value(j) + d + v * WIDE);
#pragma GCC unroll 6
        for (int64_t q = 0; q < N; q++)
#pragma GCC unroll 2
            for (int64_t v = 0; v < V; v++) sum[q][v] = fused_add(sum[q][v], Wide{} + scores[q * KEYS + j], part[v]);
    }
    for (int64_t q = 0; q < N; q++)
        for (int64_t v = 0; v < V; v++) vector_at(sums + q * padded + d + v * WIDE) = sum[q][v];
}

// The same for all of the first `width` elements.
template <int64_t N, class Value>
inline __attribute__((always_inline)) void mix_strip(const float *scores, const Value &value, float *sums, int64_t padded,
                                                     int64_t count, int64_t width) {
    int64_t d = 0;
    for (; d + PAIR <= width; d += PAIR) mix_vectors<N, 2>(scores, value, sums, padded, count, d);
    for (; d + WIDE <= width; d += WIDE) mix_vectors<N, 1>(scores, value, sums, padded, count, d);
    for (; d < width; d++)
        for (int64_t q = 0; q < N; q++)
            for (int64_t j = 0; j < count; j++) sums[q * padded + d] += scores[q * KEYS + j] * widen(value(j)[d]);
}

// scores[q][j + k] = queries[q] . key[j + k] for N queries and K keys; the same bits whatever N and K are.
template <int64_t N, int64_t K, class T>
void score_few(const float *queries, const T *const *key, float *scores, int64_t head_dim, int64_t padded) {
    Wide sum[N][K] = {};
    int64_t d = 0;
    for (; d + WIDE <= head_dim; d += WIDE)
#pragma GCC unroll 4
        for (int64_t k = 0; k < K; k++) {
            Wide part = widened(key[k] + d);
#pragma GCC unroll 4
            for (int64_t q = 0; q < N; q++) sum[q][k] = fused_add(sum[q][k], vector_at(queries + q * padded + d), part);
        }
    for (int64_t q = 0; q < N; q++)
        for (int64_t k = 0; k < K; k++) {
            float rest = 0;
            for (int64_t i = d; i < head_dim; i++) rest += queries[q * padded + i] * widen(key[k][i]);
            scores[q * KEYS + k] = sum_of(sum[q][k]) + rest;
        }
}

template <class T> class RowAttention {
    struct Scratch {
        alignas(64) float queries[QUERIES * WIDEST_HEAD];
        alignas(64) float sums[QUERIES * WIDEST_HEAD];
        alignas(64) float scores[QUERIES * KEYS];
        alignas(64) float keys[WIDEST_HEAD * KEYS];  // transposed: [head_dim][KEYS]
        alignas(64) float values[KEYS * WIDEST_HEAD];
        float highest[QUERIES], total[QUERIES];
        const T *key[KEYS], *value[KEYS];  // in the cache
        int64_t position[QUERIES];
    };

    const Paged<T> &a;
    Scratch s;

    // Length of a row of the scratch: whole vectors. Elements past head_dim are zero.
    int64_t padded() const { return (a.head_dim + LANES - 1) / LANES * LANES; }

public:
    explicit RowAttention(const Paged<T> &a) : a(a) {}

    // The queries of a tile over all keys that they see.
    void run(const Tile &tile, const Tile &) {
        int64_t count = tile.count * a.queries(tile), width = padded();
        std::memset(s.sums, 0, count * width * sizeof(float));
        for (int64_t i = 0; i < count; i++) {
            s.position[i] = a.position(tile, i);
            s.highest[i] = -std::numeric_limits<float>::infinity();
            s.total[i] = 0;
            const T *query = a.q + a.place(tile, i, a.q_width);
            for (int64_t d = 0; d < a.head_dim; d++) s.queries[i * width + d] = widen(query[d]);
        }
        for (int64_t i = 0; i <= tile.count; i++) over(a.part(tile, i), few(tile));
        for (int64_t i = 0; i < count; i++)
            a.finish(tile, i, s.sums + i * width, s.total[i], s.highest[i] + std::log(s.total[i]));
    }

private:
    // By the queries of one row, so that its result does not depend on the rows that share its keys.
    bool few(const Tile &tile) const { return a.queries(tile) < FEW; }

    // The queries of a part over its keys.
    void over(const Part &part, bool few) {
        prefetch(part, part.begin);
        for (int64_t at = part.begin; at < part.end; at += KEYS) {
            int64_t n = std::min(KEYS, part.end - at), last = part.first + part.queries;
            locate(part, at, n);
            // The next keys are loaded while these are worked on; otherwise each line of memory would be waited for.
            prefetch(part, at + KEYS);
            if (few) {
                score_rows(part.first, last, n, s.key);
                soften(part.first, last, at, n);
                mix_few(part.first, last, n);
            } else {
                widen_keys(n);
                if (a.fixed_order)
                    score_widened(part.first, last, n);
                else
                    score(part.first, last);
                soften(part.first, last, at, n);
                mix(part.first, last, n);
            }
        }
    }

    // Offset of a position's key in the cache of keys, and of its value in that of values.
    int64_t offset(const Part &part, int64_t position) const {
        return (a.rows.slot(part.row, position) * a.kv_heads + part.head) * a.head_dim;
    }

    // Set the addresses of n keys and values, from position `at` on.
    void locate(const Part &part, int64_t at, int64_t n) {
        for (int64_t j = 0; j < n; j++) {
            int64_t where = offset(part, part.alive(at + j));
            s.key[j] = a.keys + where;
            s.value[j] = a.values + where;
        }
    }

    // Prefetch keys and values from position `at` on. Always inlined: GCC regards a function that only prefetches as
    // one without effect, and drops it.
    __attribute__((always_inline)) void prefetch(const Part &part, int64_t at) const {
        for (int64_t position = at; position < std::min(at + KEYS, part.end); position++) {
            int64_t where = offset(part, position);
            for (int64_t d = 0; d < a.head_dim; d += int64_t(LINE / sizeof(T))) {
                __builtin_prefetch(a.keys + where + d);
                __builtin_prefetch(a.values + where + d);
            }
        }
    }

    // Transpose the keys, and widen keys and values to float, which pays if many queries read them. In a fixed order keys
    // stay as they are.
    void widen_keys(int64_t n) {
        int64_t width = padded(), next = a.fixed_order ? 1 : KEYS, row = a.fixed_order ? width : 1;
        for (int64_t j = 0; j < n; j++) {
            for (int64_t d = 0; d < a.head_dim; d++) s.keys[d * next + j * row] = widen(s.key[j][d]);
            for (int64_t d = 0; d < a.head_dim; d++) s.values[j * width + d] = widen(s.value[j][d]);
            for (int64_t d = a.head_dim; d < width; d++) s.values[j * width + d] = 0;
        }
    }

    // Scores of KEYS keys. Columns past the last key are left over from earlier ones; their scores are never read.
    void score(int64_t i, int64_t last) {
        int64_t width = padded();
        for (; i + ROWS <= last; i += ROWS)
            score_strip<ROWS>(s.queries + i * width, s.keys, s.scores + i * KEYS, a.head_dim, width);
        for (; i < last; i++) score_strip<1>(s.queries + i * width, s.keys, s.scores + i * KEYS, a.head_dim, width);
    }

    // Online softmax: scores become weights relative to the highest score so far, and the sums are rescaled.
    void soften(int64_t first, int64_t last, int64_t at, int64_t n) {
        int64_t width = padded();
        for (int64_t i = first; i < last; i++) {
            float *row = s.scores + i * KEYS;
            auto [from, to] = a.seen(s.position[i], at, n);
            for (int64_t j = 0; j < from; j++) row[j] = 0;
            for (int64_t j = to; j < n; j++) row[j] = 0;
            if (from == to) continue;
            float highest = s.highest[i];
            for (int64_t j = from; j < to; j++) row[j] *= a.scale;
#pragma omp simd reduction(max : highest)
            for (int64_t j = from; j < to; j++) highest = std::max(highest, row[j]);
            float shrink = exp_moderate(s.highest[i] - highest), total = 0;
#pragma omp simd reduction(+ : total)
            for (int64_t j = from; j < to; j++) {
                row[j] = exp_moderate(row[j] - highest);
                total += row[j];
            }
            if (shrink != 1.0f)
                for (int64_t d = 0; d < width; d++) s.sums[i * width + d] *= shrink;
            s.total[i] = s.total[i] * shrink + total;
            s.highest[i] = highest;
        }
    }

    // Scores of n keys that were not transposed.
    template <class Number> void score_rows(int64_t i, int64_t last, int64_t n, const Number *const *key) {
        for (; i + 4 <= last; i += 4) score_keys<4, 2>(i, n, key);
        for (; i + 2 <= last; i += 2) score_keys<2, 4>(i, n, key);
        for (; i < last; i++) score_keys<1, 4>(i, n, key);
    }

    // The same of widened keys, each score in the same order of sums.
    void score_widened(int64_t i, int64_t last, int64_t n) {
        const float *key[KEYS];
        for (int64_t j = 0; j < n; j++) key[j] = s.keys + j * padded();
        score_rows(i, last, n, key);
    }

    template <int64_t N, int64_t K, class Number> void score_keys(int64_t i, int64_t n, const Number *const *key) {
        const float *queries = s.queries + i * padded();
        int64_t j = 0;
        for (; j + K <= n; j += K)
            score_few<N, K>(queries, key + j, s.scores + i * KEYS + j, a.head_dim, padded());
        for (; j < n; j++) score_few<N, 1>(queries, key + j, s.scores + i * KEYS + j, a.head_dim, padded());
    }

    void mix(int64_t i, int64_t last, int64_t n) {
        int64_t width = padded();
        auto value = [&](int64_t j) { return s.values + j * width; };
        for (; i + ROWS <= last; i += ROWS)
            mix_strip<ROWS>(s.scores + i * KEYS, value, s.sums + i * width, width, n, width);
        for (; i < last; i++) mix_strip<1>(s.scores + i * KEYS, value, s.sums + i * width, width, n, width);
    }

    void mix_few(int64_t i, int64_t last, int64_t n) {
        int64_t width = padded();
        auto value = [&](int64_t j) { return s.value[j]; };
        for (; i + 4 <= last; i += 4) mix_strip<4>(s.scores + i * KEYS, value, s.sums + i * width, width, n, a.head_dim);
        for (; i + 3 <= last; i += 3) mix_strip<3>(s.scores + i * KEYS, value, s.sums + i * width, width, n, a.head_dim);
        for (; i < last; i++) mix_strip<1>(s.scores + i * KEYS, value, s.sums + i * width, width, n, a.head_dim);
    }
};
