// The CPU kernels: plain C++ that a compiler vectorises for the machine it runs on, behind a C ABI.
// Tensors are rows of T (bf16 as its bits, or float), sums are float. A step's tokens are shared out over
// OpenMP's threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

template <class T> inline T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    // To nearest, ties to even; a NaN keeps its top bits and stays one.
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded)};
}

// e^x for x <= 0, to about 1e-7: 2^(integer part) times a polynomial in the rest. Vectorises, unlike expf.
inline float exp_negative(float x) {
    x = std::max(x, -87.0f);
    float n = std::floor(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t scale = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &scale, 4);
    return p * power;
}

// ---------------------------------------------------------------------------------------------- norms

template <class T> void norm_row(const T *x, T *residual, const T *weight, T *out, int64_t width, float eps) {
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

template <class T>
void norm(const T *x, T *residual, const T *weight, T *out, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for if (rows >= 8)
    for (int64_t r = 0; r < rows; r++)
        norm_row(x + r * width, residual ? residual + r * width : nullptr, weight, out + r * width, width, eps);
}

template <class T> void silu_mul(const T *gate_up, T *out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows >= 4)
    for (int64_t r = 0; r < rows; r++) {
        const T *gate = gate_up + r * 2 * width, *up = gate + width;
        T *row = out + r * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float g = widen(gate[i]);
            float e = exp_negative(-std::fabs(g));
            float sigmoid = (g >= 0 ? 1.0f : e) / (1.0f + e);
            row[i] = narrow<T>(g * sigmoid * widen(up[i]));
        }
    }
}

// ------------------------------------------------------------------------------- rotation and storing

// Rotates one head by a row of the table: head_dim/2 cosines, then as many sines. `from` may be `to`.
template <class T> void rotate_head(const T *from, T *to, const float *table, int64_t head_dim) {
    int64_t half = head_dim / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = widen(from[i]), b = widen(from[i + half]), c = table[i], s = table[i + half];
        to[i] = narrow<T>(a * c - b * s);
        to[i + half] = narrow<T>(b * c + a * s);
    }
}

template <class T>
void rotate_and_store(const T *qkv, T *q, T *keys, T *values, const float *table, const int32_t *positions,
                      const int64_t *slots, const T *q_norm, const T *k_norm, float eps, int64_t tokens,
                      int64_t q_heads, int64_t kv_heads, int64_t head_dim) {
    int64_t width = (q_heads + 2 * kv_heads) * head_dim;
#pragma omp parallel for if (tokens >= 4)
    for (int64_t t = 0; t < tokens; t++) {
        const T *row = qkv + t * width;
        const float *angles = table + int64_t(positions[t]) * head_dim;
        T *key = keys + slots[t] * kv_heads * head_dim, *value = values + slots[t] * kv_heads * head_dim;
        for (int64_t h = 0; h < q_heads + kv_heads; h++) {
            bool query = h < q_heads;
            const T *from = row + h * head_dim, *weight = query ? q_norm : k_norm;
            T *to = query ? q + (t * q_heads + h) * head_dim : key + (h - q_heads) * head_dim;
            if (weight) {
                norm_row<T>(from, nullptr, weight, to, head_dim, eps);
                from = to;
            }
            rotate_head(from, to, angles, head_dim);
        }
        std::memcpy(value, row + (q_heads + kv_heads) * head_dim, kv_heads * head_dim * sizeof(T));
    }
}

// ------------------------------------------------------------------------------------------ attention

constexpr int64_t KEYS = 64;     // keys per tile
constexpr int64_t QUERIES = 96;  // query vectors per tile: tokens x heads of one group
constexpr int64_t WIDEST = 256;  // head_dim at most
constexpr int64_t LINE = 64;      // bytes that come from memory at once
constexpr int64_t LANES = 16;    // keys per vector of scores
constexpr int64_t STRIP = 6;     // queries that share a loaded vector of keys or values
constexpr int64_t ALONE = 1 << 18;  // multiply-adds that one thread does sooner than two would meet, some 20 us
constexpr int64_t FEW = 16;      // below so many queries, keys are not worth transposing

template <class T> struct Scratch {
    alignas(64) float queries[QUERIES * WIDEST];
    alignas(64) float sums[QUERIES * WIDEST];
    alignas(64) float scores[QUERIES * KEYS];
    alignas(64) float keys[WIDEST * KEYS];  // transposed: [head_dim][KEYS]
    alignas(64) float values[KEYS * WIDEST];
    T weights[QUERIES * KEYS];              // the scores once more, rounded
    float highest[QUERIES], total[QUERIES];
    const T *query[QUERIES], *key[KEYS], *value[KEYS];  // where they lie
};

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

#ifdef __AVX512BF16__
// 32 products an instruction; the tail is loaded under a mask.
template <> inline float dot<bf16>(const bf16 *a, const bf16 *b, int64_t count) {
    __m512 sum = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 32 <= count; i += 32)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a + i), (__m512bh)_mm512_loadu_si512(b + i));
    if (i < count) {
        __mmask32 rest = (1u << (count - i)) - 1;
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(rest, a + i),
                               (__m512bh)_mm512_maskz_loadu_epi16(rest, b + i));
    }
    return _mm512_reduce_add_ps(sum);
}

// Two neighbouring bf16 in every lane: one side of 16 x 2 products.
inline __m512bh pair(const bf16 *from) {
    int32_t bits;
    std::memcpy(&bits, from, 4);
    return (__m512bh)_mm512_set1_epi32(bits);
}

inline __m512bh pairs(const float *from) { return (__m512bh)_mm512_load_si512(from); }

// As score_strip, for 64 keys whose dims lie in pairs: keys[d / 2][KEYS].
template <int64_t N> void score_pairs(const bf16 *const *query, const float *keys, float *scores, int64_t head_dim) {
    __m512 sum[N][4];
#pragma GCC unroll 8
    for (int64_t q = 0; q < N; q++)
#pragma GCC unroll 4
        for (int64_t c = 0; c < 4; c++) sum[q][c] = _mm512_setzero_ps();
    for (int64_t d = 0; d < head_dim; d += 2) {
        const float *row = keys + d / 2 * KEYS;
#pragma GCC unroll 8
        for (int64_t q = 0; q < N; q++)
#pragma GCC unroll 4
            for (int64_t c = 0; c < 4; c++)
                sum[q][c] = _mm512_dpbf16_ps(sum[q][c], pair(query[q] + d), pairs(row + c * LANES));
    }
#pragma GCC unroll 8
    for (int64_t q = 0; q < N; q++)
#pragma GCC unroll 4
        for (int64_t c = 0; c < 4; c++) _mm512_store_ps(scores + q * KEYS + c * LANES, sum[q][c]);
}

// As mix_strip, for C vectors of dims and keys in pairs: values[j / 2][padded].
template <int64_t N, int64_t C>
void mix_pairs(const bf16 *weights, const float *values, float *sums, int64_t padded, int64_t count) {
    __m512 sum[N][C];
#pragma GCC unroll 8
    for (int64_t q = 0; q < N; q++)
#pragma GCC unroll 4
        for (int64_t c = 0; c < C; c++) sum[q][c] = _mm512_load_ps(sums + q * padded + c * LANES);
    for (int64_t j = 0; j < count; j += 2) {
        const float *row = values + j / 2 * padded;
#pragma GCC unroll 8
        for (int64_t q = 0; q < N; q++)
#pragma GCC unroll 4
            for (int64_t c = 0; c < C; c++)
                sum[q][c] = _mm512_dpbf16_ps(sum[q][c], pair(weights + q * KEYS + j), pairs(row + c * LANES));
    }
#pragma GCC unroll 8
    for (int64_t q = 0; q < N; q++)
#pragma GCC unroll 4
        for (int64_t c = 0; c < C; c++) _mm512_store_ps(sums + q * padded + c * LANES, sum[q][c]);
}
#endif

template <class T> struct Attention {
    const T *q, *keys, *values;
    T *out;
    const int32_t *row_starts, *context, *tables;
    int64_t table_width, block_size, q_heads, kv_heads, head_dim, window;
    float scale;

    int64_t group() const { return q_heads / kv_heads; }
    // Rows of the scratch are whole vectors; what lies past head_dim is zero.
    int64_t padded() const { return (head_dim + LANES - 1) / LANES * LANES; }
    // Where query i of a tile lies in q and in out.
    int64_t place(int64_t first, int64_t head, int64_t i) const {
        return ((first + i / group()) * q_heads + head * group() + i % group()) * head_dim;
    }

    // The queries of tokens [first, last) of one row and one KV head, over all keys that they see.
    void tile(int64_t row, int64_t head, int64_t first, int64_t last, Scratch<T> &s) const {
        int64_t count = (last - first) * group(), width = padded();
        bool few = count < FEW;
        int64_t position = context[row] - row_starts[row + 1] + first;  // of the first query
        int64_t end = position + (last - first);                        // the last query sees keys 0..end-1
        int64_t begin = window ? std::max<int64_t>(0, position - window + 1) : 0;
        std::memset(s.sums, 0, count * width * sizeof(float));
        for (int64_t i = 0; i < count; i++) {
            s.query[i] = q + place(first, head, i);
            s.highest[i] = -std::numeric_limits<float>::infinity();
            s.total[i] = 0;
            if (!few)
                for (int64_t d = 0; d < head_dim; d++) s.queries[i * width + d] = widen(s.query[i][d]);
        }
        fetch(row, head, begin, std::min(KEYS, end - begin));
        for (int64_t at = begin; at < end; at += KEYS) {
            int64_t n = std::min(KEYS, end - at);
            find(row, head, at, n, s);
            // The next tile comes while this one is worked on: without that, memory is waited for line by line.
            fetch(row, head, at + KEYS, std::min(KEYS, end - at - KEYS));
            if (few) {
                for (int64_t j = 0; j < n; j++)
                    for (int64_t i = 0; i < count; i++) s.scores[i * KEYS + j] = dot(s.query[i], s.key[j], head_dim);
                soften(count, position, at, n, s);
                mix_few(count, n, s);
#ifdef __AVX512BF16__
            } else if constexpr (sizeof(T) == 2) {
                pack_tile(n, s);
                score_packed(count, s);
                soften(count, position, at, n, s);
                mix_packed(count, n, s);
#endif
            } else {
                widen_tile(n, s);
                score(count, s);
                soften(count, position, at, n, s);
                mix(count, n, s);
            }
        }
        for (int64_t i = 0; i < count; i++) {
            T *to = out + place(first, head, i);
            float share = 1.0f / s.total[i];
            for (int64_t d = 0; d < head_dim; d++) to[d] = narrow<T>(s.sums[i * width + d] * share);
        }
    }

    // Where a key lies in its cache, and a value in its own.
    int64_t offset(int64_t row, int64_t head, uint32_t position) const {
        uint32_t size = block_size;
        int64_t block = tables[row * table_width + position / size];
        return ((block * size + position % size) * kv_heads + head) * head_dim;
    }

    // The places of n keys and values, from position `at` on.
    void find(int64_t row, int64_t head, int64_t at, int64_t n, Scratch<T> &s) const {
        for (int64_t j = 0; j < n; j++) {
            int64_t where = offset(row, head, at + j);
            s.key[j] = keys + where;
            s.value[j] = values + where;
        }
    }

    // Ask for them ahead of time. Inlined always: GCC takes a function that only prefetches for one without
    // effect, and drops it.
    __attribute__((always_inline)) void fetch(int64_t row, int64_t head, int64_t at, int64_t n) const {
        for (int64_t j = 0; j < n; j++) {
            int64_t where = offset(row, head, at + j);
            for (int64_t d = 0; d < head_dim; d += int64_t(LINE / sizeof(T))) {
                __builtin_prefetch(keys + where + d);
                __builtin_prefetch(values + where + d);
            }
        }
    }

    // The tile's keys, transposed, and values as floats: worth it where many queries read them.
    void widen_tile(int64_t n, Scratch<T> &s) const {
        int64_t width = padded();
        for (int64_t j = 0; j < n; j++) {
            for (int64_t d = 0; d < head_dim; d++) s.keys[d * KEYS + j] = widen(s.key[j][d]);
            for (int64_t d = 0; d < head_dim; d++) s.values[j * width + d] = widen(s.value[j][d]);
            for (int64_t d = head_dim; d < width; d++) s.values[j * width + d] = 0;
        }
    }

    // Columns past the tile's n hold what an earlier tile left; their scores are never read.
    void score(int64_t count, Scratch<T> &s) const {
        int64_t width = padded(), i = 0;
        for (; i + STRIP <= count; i += STRIP)
            score_strip<STRIP>(s.queries + i * width, s.keys, s.scores + i * KEYS, head_dim, width);
        for (; i < count; i++) score_strip<1>(s.queries + i * width, s.keys, s.scores + i * KEYS, head_dim, width);
    }

    // Online softmax: scores become weights against the highest score so far; what was summed is rescaled.
    void soften(int64_t count, int64_t first, int64_t at, int64_t n, Scratch<T> &s) const {
        int64_t width = padded();
        for (int64_t i = 0; i < count; i++) {
            float *row = s.scores + i * KEYS;
            int64_t position = first + i / group();
            // The keys of this tile that the query sees: [from, to).
            int64_t to = std::clamp<int64_t>(position + 1 - at, 0, n);
            int64_t from = window ? std::clamp<int64_t>(position - window + 1 - at, 0, to) : 0;
            for (int64_t j = 0; j < from; j++) row[j] = 0;
            for (int64_t j = to; j < n; j++) row[j] = 0;
            if (from == to) continue;
            float highest = s.highest[i];
            for (int64_t j = from; j < to; j++) row[j] *= scale;
#pragma omp simd reduction(max : highest)
            for (int64_t j = from; j < to; j++) highest = std::max(highest, row[j]);
            float shrink = exp_negative(s.highest[i] - highest), total = 0;
#pragma omp simd reduction(+ : total)
            for (int64_t j = from; j < to; j++) {
                row[j] = exp_negative(row[j] - highest);
                total += row[j];
            }
            if (shrink != 1.0f)
                for (int64_t d = 0; d < width; d++) s.sums[i * width + d] *= shrink;
            s.total[i] = s.total[i] * shrink + total;
            s.highest[i] = highest;
        }
    }

    void mix(int64_t count, int64_t n, Scratch<T> &s) const {
        int64_t width = padded(), i = 0;
        for (; i + STRIP <= count; i += STRIP)
            mix_strip<STRIP>(s.scores + i * KEYS, s.values, s.sums + i * width, width, n);
        for (; i < count; i++) mix_strip<1>(s.scores + i * KEYS, s.values, s.sums + i * width, width, n);
    }

#ifdef __AVX512BF16__
    // The tile in pairs of bf16, as the instruction wants them: keys by dim, values by key, zero past n.
    void pack_tile(int64_t n, Scratch<T> &s) const {
        int64_t width = padded();
        for (int64_t j = 0; j < n; j++)
            for (int64_t d = 0; d < head_dim; d += 2) std::memcpy(s.keys + d / 2 * KEYS + j, s.key[j] + d, 4);
        for (int64_t j = 0; j < n; j += 2) {
            const T *a = s.value[j], *b = s.value[j + 1 < n ? j + 1 : j];
            uint32_t both = j + 1 < n ? 0xffffffff : 0x0000ffff;
            for (int64_t d = 0; d < width; d++) {
                uint32_t bits = d < head_dim ? (uint32_t(a[d].bits) | uint32_t(b[d].bits) << 16) & both : 0;
                std::memcpy(s.values + j / 2 * width + d, &bits, 4);
            }
        }
    }

    void score_packed(int64_t count, Scratch<T> &s) const {
        int64_t i = 0;
        for (; i + STRIP <= count; i += STRIP) score_pairs<STRIP>(s.query + i, s.keys, s.scores + i * KEYS, head_dim);
        for (; i < count; i++) score_pairs<1>(s.query + i, s.keys, s.scores + i * KEYS, head_dim);
    }

    void mix_packed(int64_t count, int64_t n, Scratch<T> &s) const {
        int64_t width = padded(), i = 0;
        for (int64_t q = 0; q < count; q++) {
            for (int64_t j = 0; j < n; j++) s.weights[q * KEYS + j] = narrow<T>(s.scores[q * KEYS + j]);
            if (n % 2) s.weights[q * KEYS + n] = narrow<T>(0);
        }
        for (; i + STRIP <= count; i += STRIP) mix_strips<STRIP>(i, n, width, s);
        for (; i < count; i++) mix_strips<1>(i, n, width, s);
    }

    template <int64_t N> void mix_strips(int64_t i, int64_t n, int64_t width, Scratch<T> &s) const {
        const T *weights = s.weights + i * KEYS;
        float *sums = s.sums + i * width;
        int64_t d = 0;
        for (; d + 4 * LANES <= width; d += 4 * LANES) mix_pairs<N, 4>(weights, s.values + d, sums + d, width, n);
        for (; d < width; d += LANES) mix_pairs<N, 1>(weights, s.values + d, sums + d, width, n);
    }
#endif

    void mix_few(int64_t count, int64_t n, Scratch<T> &s) const {
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) mix_rows<4>(i, n, s);
        for (; i + 3 <= count; i += 3) mix_rows<3>(i, n, s);
        for (; i < count; i++) mix_rows<1>(i, n, s);
    }

    // sums[i..i+N] += weights * values, each value widened in a register and used N times.
    template <int64_t N> void mix_rows(int64_t i, int64_t n, Scratch<T> &s) const {
        int64_t width = padded(), d = 0;
        for (; d + LANES <= head_dim; d += LANES) {
            float sum[N][LANES];
            for (int64_t q = 0; q < N; q++) std::memcpy(sum[q], s.sums + (i + q) * width + d, sizeof sum[q]);
            for (int64_t j = 0; j < n; j++) {
                const T *value = s.value[j] + d;
                for (int64_t q = 0; q < N; q++)
#pragma omp simd
                    for (int64_t l = 0; l < LANES; l++) sum[q][l] += s.scores[(i + q) * KEYS + j] * widen(value[l]);
            }
            for (int64_t q = 0; q < N; q++) std::memcpy(s.sums + (i + q) * width + d, sum[q], sizeof sum[q]);
        }
        for (; d < head_dim; d++)
            for (int64_t j = 0; j < n; j++)
                for (int64_t q = 0; q < N; q++)
                    s.sums[(i + q) * width + d] += s.scores[(i + q) * KEYS + j] * widen(s.value[j][d]);
    }
};

struct Tile {
    int64_t row, head, first, last;
};

template <class T> void attend(const Attention<T> &a, int64_t rows) {
    int64_t step = std::max<int64_t>(1, QUERIES / a.group());
    std::vector<Tile> tiles;
    int64_t work = 0;
    // From each row's end: the tiles with the most keys first, so that no thread starts one when others are done.
    for (int64_t row = 0; row < rows; row++) {
        work += int64_t(a.row_starts[row + 1] - a.row_starts[row]) * a.context[row] * a.q_heads * a.head_dim;
        for (int64_t last = a.row_starts[row + 1]; last > a.row_starts[row]; last -= step)
            for (int64_t head = 0; head < a.kv_heads; head++)
                tiles.push_back({row, head, std::max<int64_t>(last - step, a.row_starts[row]), last});
    }
#pragma omp parallel if (work > ALONE)
    {
        Scratch<T> scratch;  // 360 KB of the thread's stack
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < tiles.size(); i++)
            a.tile(tiles[i].row, tiles[i].head, tiles[i].first, tiles[i].last, scratch);
    }
}

}  // namespace

#define EXPORT(T, NAME)                                                                                              \
    extern "C" void weft_norm_##NAME(const T *x, T *residual, const T *weight, T *out, int64_t rows, int64_t width,  \
                                     float eps) {                                                                    \
        norm(x, residual, weight, out, rows, width, eps);                                                            \
    }                                                                                                                \
    extern "C" void weft_silu_mul_##NAME(const T *gate_up, T *out, int64_t rows, int64_t width) {                    \
        silu_mul(gate_up, out, rows, width);                                                                         \
    }                                                                                                                \
    extern "C" void weft_rotate_and_store_##NAME(                                                                    \
        const T *qkv, T *q, T *keys, T *values, const float *table, const int32_t *positions, const int64_t *slots, \
        const T *q_norm, const T *k_norm, float eps, int64_t tokens, int64_t q_heads, int64_t kv_heads,              \
        int64_t head_dim) {                                                                                          \
        rotate_and_store(qkv, q, keys, values, table, positions, slots, q_norm, k_norm, eps, tokens, q_heads,        \
                         kv_heads, head_dim);                                                                        \
    }                                                                                                                \
    extern "C" void weft_attend_##NAME(const T *q, const T *keys, const T *values, T *out,                           \
                                       const int32_t *row_starts, const int32_t *context, const int32_t *tables,     \
                                       int64_t table_width, int64_t rows, int64_t block_size, int64_t q_heads,       \
                                       int64_t kv_heads, int64_t head_dim, int64_t window, float scale) {            \
        attend(Attention<T>{q, keys, values, out, row_starts, context, tables, table_width, block_size, q_heads,     \
                            kv_heads, head_dim, window, scale},                                                      \
               rows);                                                                                                \
    }

EXPORT(bf16, bfloat16)
EXPORT(float, float32)
