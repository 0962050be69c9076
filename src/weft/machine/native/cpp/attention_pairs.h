// Attention on CPUs that multiply bf16 in pairs (AVX512-BF16), over a KV cache in the layout that suits them.
//
// Within a block, a KV head's keys and values lie in consecutive groups of GROUP positions. A group's keys are stored
// by pairs of dims, [head_dim / 2][GROUP][2], its values by pairs of positions, [GROUP / 2][head_dim][2]. Both are read
// in whole vectors from where they are, by one query or by many.
#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "numbers.h"
#include "paged.h"

constexpr int64_t GROUP = 16;   // positions in a vector
constexpr int64_t GROUPS = KEYS / GROUP;
constexpr int STRIP = 6;        // queries that share a loaded vector of keys or values: 24 sums, 4 vectors, 1 query

// Return true if a cache has this layout.
inline bool in_pairs(int64_t block_size, int64_t head_dim) { return block_size % GROUP == 0 && head_dim % 16 == 0; }

// Offset of the group of a slot, in the cache of keys and in that of values.
inline int64_t group_at(int64_t slot, int64_t head, int64_t block_size, int64_t kv_heads, int64_t head_dim) {
    int64_t block = slot / block_size, group = slot % block_size / GROUP;
    return ((block * kv_heads + head) * (block_size / GROUP) + group) * GROUP * head_dim;
}

inline void store_in_pairs(const bf16 *key, const bf16 *value, bf16 *keys, bf16 *values, int64_t slot, int64_t head_dim) {
    int64_t at = slot % GROUP;
    for (int64_t d = 0; d < head_dim; d += 2) std::memcpy(keys + d * GROUP + at * 2, key + d, 4);
    for (int64_t d = 0; d < head_dim; d++) values[(at / 2 * head_dim + d) * 2 + at % 2] = value[d];
}

// Two neighbouring bf16 in every lane: one operand of 16 x 2 products.
inline __m512bh both(const bf16 *pair) {
    int32_t bits;
    std::memcpy(&bits, pair, 4);
    return (__m512bh)_mm512_set1_epi32(bits);
}

inline __m512bh load(const bf16 *from) { return (__m512bh)_mm512_loadu_si512(from); }

// 2^x to a relative error of 2e-6, which is more than bf16 keeps. Zero in lanes whose bit of `mask` is 0.
inline __m512 power_of_two(__m512 x, __mmask16 mask) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // Taylor series of e^(f ln 2), |f| <= 1/2.
    __m512 f = _mm512_sub_ps(x, whole), p = _mm512_set1_ps(1.33335581e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.61812911e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55041087e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147181e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(mask, p, whole);
}

// The keys and values that are worked on at once.
struct KeyGroups {
    const bf16 *keys[GROUPS], *values[GROUPS];
};

class PairedAttention {
    struct Scratch {
        alignas(64) float sums[QUERIES * WIDEST_HEAD];
        alignas(64) float scores[QUERIES * KEYS];
        alignas(64) bf16 weights[QUERIES * KEYS];  // powers of scores, rounded
        alignas(64) bf16 tail[GROUP * WIDEST_HEAD];     // the last group's values, zero past the end
        alignas(64) float total[QUERIES * LANES];  // of weights, lane by lane
        float against[QUERIES];                    // the score, times log2(e), whose weight is 1
        const bf16 *query[QUERIES];
        int64_t position[QUERIES];
    };

    const Paged<bf16> &a;
    Scratch s;

    // The groups of a part's keys from `at` on, a multiple of KEYS. Groups past the end repeat the last one.
    KeyGroups groups(const Part &part, int64_t at) const {
        KeyGroups groups;
        for (int64_t g = 0; g < GROUPS; g++) {
            int64_t position = std::min(part.alive(at + g * GROUP), part.end - 1);
            int64_t slot = a.rows.slot(part.row, position);
            int64_t where = group_at(slot, part.head, a.rows.block_size, a.kv_heads, a.head_dim);
            groups.keys[g] = a.keys + where;
            groups.values[g] = a.values + where;
        }
        return groups;
    }

    // Scores of N queries and KEYS keys, while the next keys are prefetched.
    template <int N> void score(int64_t i, const KeyGroups &now, const KeyGroups &next) {
        __m512 sum[N][GROUPS];
#pragma GCC unroll 6
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; g++) sum[n][g] = _mm512_setzero_ps();
        for (int64_t d = 0; d < a.head_dim; d += 2) {
            __m512bh keys[GROUPS];
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; g++) {
                keys[g] = load(now.keys[g] + d * GROUP);
                _mm_prefetch(next.keys[g] + d * GROUP, _MM_HINT_T0);
            }
#pragma GCC unroll 6
            for (int n = 0; n < N; n++) {
                __m512bh q = both(s.query[i + n] + d);
#pragma GCC unroll 4
                for (int g = 0; g < GROUPS; g++) sum[n][g] = _mm512_dpbf16_ps(sum[n][g], keys[g], q);
            }
        }
#pragma GCC unroll 6
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; g++) _mm512_store_ps(s.scores + (i + n) * KEYS + g * GROUP, sum[n][g]);
    }

    // sums += weights * values for N queries, C vectors of dims at a time, while the next values are prefetched.
    template <int N, int C> void mix(int64_t i, int64_t d, int64_t count, const KeyGroups &now, const KeyGroups &next) {
        __m512 sum[N][C];
        float *sums = s.sums + i * a.head_dim + d;
#pragma GCC unroll 6
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sum[n][c] = _mm512_load_ps(sums + n * a.head_dim + c * 16);
        for (int64_t g = 0; g * GROUP < count; g++)
            for (int64_t j = 0; j < GROUP; j += 2) {
                __m512bh values[C];
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) {
                    int64_t at = j * a.head_dim + (d + c * 16) * 2;
                    values[c] = load(now.values[g] + at);
                    _mm_prefetch(next.values[g] + at, _MM_HINT_T0);
                }
#pragma GCC unroll 6
                for (int n = 0; n < N; n++) {
                    __m512bh w = both(s.weights + (i + n) * KEYS + g * GROUP + j);
#pragma GCC unroll 4
                    for (int c = 0; c < C; c++) sum[n][c] = _mm512_dpbf16_ps(sum[n][c], values[c], w);
                }
            }
#pragma GCC unroll 6
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) _mm512_store_ps(sums + n * a.head_dim + c * 16, sum[n][c]);
    }

    template <int N> void mix(int64_t i, int64_t count, const KeyGroups &now, const KeyGroups &next) {
        int64_t d = 0;
        for (; d + 64 <= a.head_dim; d += 64) mix<N, 4>(i, d, count, now, next);
        for (; d < a.head_dim; d += 16) mix<N, 1>(i, d, count, now, next);
    }

    // Online softmax of query i, which sees keys [from, to) of these: scores become weights, relative to a reference
    // score. A new highest score becomes the reference, and the sums are rescaled, only if it is higher by more than
    // SLACK. Until then weights are at most 2^SLACK.
    void soften(int64_t i, int64_t from, int64_t to) {
        constexpr float LOG2E = 1.44269504f, SLACK = 8;
        if (from == to) {
            std::memset(s.weights + i * KEYS, 0, KEYS * sizeof(bf16));
            return;
        }
        float *row = s.scores + i * KEYS;
        __m512 scale = _mm512_set1_ps(a.scale * LOG2E), x[GROUPS];
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++) x[g] = _mm512_mul_ps(_mm512_load_ps(row + g * GROUP), scale);
        uint64_t seen = ~uint64_t(0) >> (KEYS - to) & ~uint64_t(0) << from;
        __m512 high = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++) high = _mm512_mask_max_ps(high, __mmask16(seen >> g * GROUP), high, x[g]);
        __m512 against = _mm512_set1_ps(s.against[i]);
        if (_mm512_cmp_ps_mask(high, _mm512_add_ps(against, _mm512_set1_ps(SLACK)), _CMP_GT_OQ)) {
            float highest = _mm512_reduce_max_ps(high);
            rescale(i, s.against[i] - highest);
            s.against[i] = highest;
            against = _mm512_set1_ps(highest);
        }
        __m512 total = _mm512_load_ps(s.total + i * LANES), w[GROUPS];
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++) {
            w[g] = power_of_two(_mm512_sub_ps(x[g], against), __mmask16(seen >> g * GROUP));
            total = _mm512_add_ps(total, w[g]);
        }
        _mm512_store_ps(s.total + i * LANES, total);
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g += 2)
            _mm512_store_si512(s.weights + i * KEYS + g * GROUP, (__m512i)_mm512_cvtne2ps_pbh(w[g + 1], w[g]));
    }

    // Multiply the sums of query i by 2^x.
    void rescale(int64_t i, float x) {
        __m512 factor = power_of_two(_mm512_set1_ps(x), 0xffff);
        float *sums = s.sums + i * a.head_dim;
        for (int64_t d = 0; d < a.head_dim; d += LANES)
            _mm512_store_ps(sums + d, _mm512_mul_ps(_mm512_load_ps(sums + d), factor));
        _mm512_store_ps(s.total + i * LANES, _mm512_mul_ps(_mm512_load_ps(s.total + i * LANES), factor));
    }

    template <int... N>
    void strip(bool scores, int64_t i, int64_t queries, int64_t count, const KeyGroups &now, const KeyGroups &next,
               std::integer_sequence<int, N...>) {
        ((queries == N + 1 && (scores ? score<N + 1>(i, now, next) : mix<N + 1>(i, count, now, next), true)) || ...);
    }

    void strips(bool scores, const Part &part, int64_t count, const KeyGroups &now, const KeyGroups &next) {
        for (int64_t i = 0; i < part.queries; i += STRIP)
            strip(scores, part.first + i, std::min<int64_t>(STRIP, part.queries - i), count, now, i ? now : next,
                  std::make_integer_sequence<int, STRIP>());
    }

    // Copy the first `count` of a group's values to `tail`, followed by zeros.
    void copy_first(const bf16 *values, int64_t count) {
        int64_t whole = count / 2 * a.head_dim * 2;
        std::memcpy(s.tail, values, whole * sizeof(bf16));
        std::memset(s.tail + whole, 0, (GROUP * a.head_dim - whole) * sizeof(bf16));
        if (count % 2)
            for (int64_t d = whole; d < whole + a.head_dim * 2; d += 2) s.tail[d] = values[d];
    }

    // The queries of a part over its keys: `now` are the first ones, `after` the first ones of the next part.
    void over(const Part &part, KeyGroups now, const KeyGroups &after) {
        for (int64_t at = part.begin; at < part.end; at += KEYS) {
            int64_t count = std::min(KEYS, part.end - at);
            KeyGroups next = at + KEYS < part.end ? groups(part, at + KEYS) : after;
            strips(true, part, count, now, next);
            for (int64_t i = part.first; i < part.first + part.queries; i++) {
                auto [from, to] = a.seen(s.position[i], at, count);
                soften(i, from, to);
            }
            if (int64_t remainder = count % GROUP) {
                // Values of another request may still be there, and 0 times an infinite one would be NaN.
                copy_first(now.values[count / GROUP], remainder);
                now.values[count / GROUP] = s.tail;
            }
            strips(false, part, count, now, next);
            now = next;
        }
    }

public:
    explicit PairedAttention(const Paged<bf16> &a) : a(a) {}

    // The queries of a tile over all keys that they see. `after` is the next tile, or the same one.
    void run(const Tile &tile, const Tile &after) {
        int64_t queries = tile.count * a.queries(tile);
        std::memset(s.sums, 0, queries * a.head_dim * sizeof(float));
        std::memset(s.total, 0, queries * LANES * sizeof(float));
        for (int64_t i = 0; i < queries; i++) {
            s.query[i] = a.q + a.place(tile, i, a.q_width);
            s.position[i] = a.position(tile, i);
            s.against[i] = -std::numeric_limits<float>::max();
        }
        for (int64_t i = 0; i <= tile.count; i++) {
            Part part = a.part(tile, i), next = i < tile.count ? a.part(tile, i + 1) : a.first_part(after);
            if (part.begin < part.end) over(part, groups(part, part.begin), groups(next, next.begin));
        }
        constexpr float LN2 = 0.693147181f;
        for (int64_t i = 0; i < queries; i++) {
            float total = _mm512_reduce_add_ps(_mm512_load_ps(s.total + i * LANES));
            a.finish(tile, i, s.sums + i * a.head_dim, total, s.against[i] * LN2 + std::log(total));
        }
    }
};
#endif
