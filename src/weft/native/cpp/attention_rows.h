// Attention in plain loops over a KV cache in the layout [block, position, head, head_dim].
#pragma once

#include <limits>

#include "numbers.h"
#include "paged.h"

constexpr int64_t LINE = 64;   // bytes of a cache line
constexpr int64_t ROWS = 6;    // queries that share a loaded vector of keys or values
constexpr int64_t FEW = 16;    // queries: with fewer, transposing the keys does not pay

// scores[q][j] = queries[q] . keys[:, j] for N queries; rows of queries are `padded` long.
template <int64_t N>
void score_strip(const float *queries, const float *keys, float *scores, int64_t head_dim, int64_t padded) {
    for (int64_t j = 0; j < KEYS; j += LANES) {
        float sum[N][LANES] = {};
        for (int64_t d = 0; d < head_dim; d++)
            for (int64_t q = 0; q < N; q++)
#pragma omp simd
                for (int64_t l = 0; l < LANES; l++) sum[q][l] += queries[q * padded + d] * keys[d * KEYS + j + l];
        for (int64_t q = 0; q < N; q++) std::memcpy(scores + q * KEYS + j, sum[q], sizeof sum[q]);
    }
}

// sums[q] += sum over j of scores[q][j] * values[j] for N queries and `count` keys; rows are `padded` long.
template <int64_t N>
void mix_strip(const float *scores, const float *values, float *sums, int64_t padded, int64_t count) {
    for (int64_t d = 0; d < padded; d += LANES) {
        float sum[N][LANES];
        for (int64_t q = 0; q < N; q++) std::memcpy(sum[q], sums + q * padded + d, sizeof sum[q]);
        for (int64_t j = 0; j < count; j++)
            for (int64_t q = 0; q < N; q++)
#pragma omp simd
                for (int64_t l = 0; l < LANES; l++) sum[q][l] += scores[q * KEYS + j] * values[j * padded + d + l];
        for (int64_t q = 0; q < N; q++) std::memcpy(sums + q * padded + d, sum[q], sizeof sum[q]);
    }
}

template <class T> inline float dot(const T *a, const T *b, int64_t count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += widen(a[i]) * widen(b[i]);
    return sum;
}

template <class T> class RowAttention {
    struct Scratch {
        alignas(64) float queries[QUERIES * WIDEST_HEAD];
        alignas(64) float sums[QUERIES * WIDEST_HEAD];
        alignas(64) float scores[QUERIES * KEYS];
        alignas(64) float keys[WIDEST_HEAD * KEYS];  // transposed: [head_dim][KEYS]
        alignas(64) float values[KEYS * WIDEST_HEAD];
        float highest[QUERIES], total[QUERIES];
        const T *query[QUERIES], *key[KEYS], *value[KEYS];  // in q and in the cache
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
            s.query[i] = a.q + a.place(tile, i, a.q_width);
            s.position[i] = a.position(tile, i);
            s.highest[i] = -std::numeric_limits<float>::infinity();
            s.total[i] = 0;
            if (!few(tile))
                for (int64_t d = 0; d < a.head_dim; d++) s.queries[i * width + d] = widen(s.query[i][d]);
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
                for (int64_t j = 0; j < n; j++)
                    for (int64_t i = part.first; i < last; i++)
                        s.scores[i * KEYS + j] = dot(s.query[i], s.key[j], a.head_dim);
                soften(part.first, last, at, n);
                mix_few(part.first, last, n);
            } else {
                widen_keys(n);
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
            int64_t where = offset(part, at + j);
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

    // Transpose the keys, and widen keys and values to float, which pays if many queries read them.
    void widen_keys(int64_t n) {
        int64_t width = padded();
        for (int64_t j = 0; j < n; j++) {
            for (int64_t d = 0; d < a.head_dim; d++) s.keys[d * KEYS + j] = widen(s.key[j][d]);
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

    void mix(int64_t i, int64_t last, int64_t n) {
        int64_t width = padded();
        for (; i + ROWS <= last; i += ROWS)
            mix_strip<ROWS>(s.scores + i * KEYS, s.values, s.sums + i * width, width, n);
        for (; i < last; i++) mix_strip<1>(s.scores + i * KEYS, s.values, s.sums + i * width, width, n);
    }

    void mix_few(int64_t i, int64_t last, int64_t n) {
        for (; i + 4 <= last; i += 4) mix_rows<4>(i, n);
        for (; i + 3 <= last; i += 3) mix_rows<3>(i, n);
        for (; i < last; i++) mix_rows<1>(i, n);
    }

    template <int64_t N> void mix_rows(int64_t i, int64_t n) {
        int64_t d = 0;
        for (; d + LANES <= a.head_dim; d += LANES) mix_lanes<N>(i, n, d, LANES);
        if (d < a.head_dim) mix_lanes<N>(i, n, d, a.head_dim - d);
    }

    // sums[i..i+N][d..d+lanes] += weights * values, each value widened in a register and used N times. Keys are added
    // in their order whatever N is, so a query gets the same bits beside others as alone.
    template <int64_t N> __attribute__((always_inline)) void mix_lanes(int64_t i, int64_t n, int64_t d, int64_t lanes) {
        int64_t width = padded();
        float sum[N][LANES];
        for (int64_t q = 0; q < N; q++) std::memcpy(sum[q], s.sums + (i + q) * width + d, sizeof sum[q]);
        for (int64_t j = 0; j < n; j++) {
            const T *value = s.value[j] + d;
            for (int64_t q = 0; q < N; q++)
#pragma omp simd
                for (int64_t l = 0; l < lanes; l++) sum[q][l] += s.scores[(i + q) * KEYS + j] * widen(value[l]);
        }
        for (int64_t q = 0; q < N; q++) std::memcpy(s.sums + (i + q) * width + d, sum[q], sizeof sum[q]);
    }
};

