// Products with weights in bf16 or fp32.
//
// A panel of PANEL output rows lies column by column: fp32 as [cols][PANEL], bf16 in pairs of neighbouring columns,
// [cols / 2][PANEL][2], as AVX512-BF16 multiplies them. Incomplete panels and pairs are padded with zeros. A tile is a
// panel times up to TOKENS tokens, with its sums in registers.
#pragma once

#include <type_traits>
#include <utility>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "amx.h"
#include "numbers.h"
#include "team.h"
#include "transpose.h"

constexpr int64_t PANEL = 32;  // output rows that are packed together

template <class T> constexpr int64_t DEPTH = 1;  // columns that lie together: a word of each row
template <> inline constexpr int64_t DEPTH<bf16> = 2;

// Number of elements of a packed panel.
template <class T> inline int64_t panel_size(int64_t cols) {
    return (cols + DEPTH<T> - 1) / DEPTH<T> * DEPTH<T> * PANEL;
}

// Pack a weight [rows, cols] into panels.
template <class T> void pack_dense(const T *weight, T *to, int64_t rows, int64_t cols, int64_t threads) {
    constexpr int64_t WIDE = SQUARE * DEPTH<T>;  // columns of a square
    int64_t panels = (rows + PANEL - 1) / PANEL, size = panel_size<T>(cols);
    auto pack = [&](int64_t first, int64_t last) {
        for (int64_t p = first; p < last; p++) {
            const T *from = weight + p * PANEL * cols;
            T *panel = to + p * size;
            int64_t c = 0, count = std::min(PANEL, rows - p * PANEL);
            if (count == PANEL)
                for (; c + WIDE <= cols; c += WIDE)
                    for (int64_t r = 0; r < PANEL; r += SQUARE)
                        transpose(from + r * cols + c, cols * sizeof(T), panel + c * PANEL + r * DEPTH<T>, PANEL * 4);
            for (; c < cols; c += DEPTH<T>)
                for (int64_t r = 0; r < PANEL; r++)
                    for (int64_t d = 0; d < DEPTH<T>; d++)
                        panel[c * PANEL + r * DEPTH<T> + d] =
                            r < count && c + d < cols ? from[r * cols + c + d] : narrow<T>(0);
        }
    };
    together(threads, rows * cols > SMALL, [&](Team &team) { team.each(panels, pack); });
}

// One row of packed weights: out [cols].
template <class T> void dense_row(const T *data, int64_t row, int64_t cols, T *out) {
    const T *panel = data + row / PANEL * panel_size<T>(cols);
    for (int64_t c = 0; c < cols; c++)
        out[c] = panel[(c / DEPTH<T> * PANEL + row % PANEL) * DEPTH<T> + c % DEPTH<T>];
}

#ifdef __AVX512BF16__
constexpr int TOKENS = 12;  // 24 sums, 2 vectors of weights and one of x in 32 registers
constexpr int64_t CACHED = 1 << 30;  // bytes of rows of x that all panels of a piece of work are multiplied with at once

constexpr bool ONE_ORDER = false;  // tiles add in an order that depends on N, unless they are FIXED

// Sums of one tile, [N][PANEL]. `rate` / 256 bytes from `ahead` on, which is read next, are prefetched per column. If
// FIXED, a row of x gets the same bits for any N.
template <int N, bool FIXED>
void dense_tile(const float *panel, const float *x, int64_t cols, float *sums, const char *, int64_t) {
    float sum[N][PANEL] = {};
    for (int64_t c = 0; c < cols; c++)
        for (int n = 0; n < N; n++)
#pragma omp simd
            for (int64_t r = 0; r < PANEL; r++) sum[n][r] += x[n * cols + c] * panel[c * PANEL + r];
    std::memcpy(sums, sum, sizeof sum);
}

inline __m512bh twice(const bf16 *pair) {
    int32_t bits;
    std::memcpy(&bits, pair, 4);
    return (__m512bh)_mm512_set1_epi32(bits);
}

template <int N, bool FIXED>
void dense_tile(const bf16 *panel, const bf16 *x, int64_t cols, float *sums, const char *ahead, int64_t rate) {
    // Few tokens leave registers free: neighbouring columns then have sums of their own, or each product would wait for
    // the last.
    constexpr int WAYS = FIXED ? 1 : N == 1 ? 4 : N <= 3 ? 2 : 1;
    __m512 sum[WAYS][N][2];
#pragma GCC unroll 4
    for (int w = 0; w < WAYS; w++)
#pragma GCC unroll 12
        for (int n = 0; n < N; n++) sum[w][n][0] = sum[w][n][1] = _mm512_setzero_ps();
    // Addresses of every third row only: there are not enough registers for twelve.
    const bf16 *row[(N + 2) / 3];
    for (int n = 0; n < N; n += 3) row[n / 3] = x + n * cols;
    int64_t c = 0;
    for (; c + 2 * WAYS <= cols; c += 2 * WAYS) {
#pragma GCC unroll 4
        for (int w = 0; w < WAYS; w++) {
            const bf16 *at = panel + (c + 2 * w) * PANEL;
            __m512bh low = (__m512bh)_mm512_loadu_si512(at), high = (__m512bh)_mm512_loadu_si512(at + PANEL);
            const char *line = ahead + ((c + 2 * w) * rate >> 8);
            _mm_prefetch(line, _MM_HINT_T0);
            _mm_prefetch(line + 64, _MM_HINT_T0);
#pragma GCC unroll 12
            for (int n = 0; n < N; n++) {
                __m512bh both = twice(row[n / 3] + n % 3 * cols + c + 2 * w);
                sum[w][n][0] = _mm512_dpbf16_ps(sum[w][n][0], low, both);
                sum[w][n][1] = _mm512_dpbf16_ps(sum[w][n][1], high, both);
            }
        }
    }
    for (; c < cols; c += 2) {
        const bf16 *at = panel + c * PANEL;
        __m512bh low = (__m512bh)_mm512_loadu_si512(at), high = (__m512bh)_mm512_loadu_si512(at + PANEL);
#pragma GCC unroll 12
        for (int n = 0; n < N; n++) {
            bf16 pair[2] = {x[n * cols + c], c + 1 < cols ? x[n * cols + c + 1] : bf16{0}};
            sum[0][n][0] = _mm512_dpbf16_ps(sum[0][n][0], low, twice(pair));
            sum[0][n][1] = _mm512_dpbf16_ps(sum[0][n][1], high, twice(pair));
        }
    }
#pragma GCC unroll 12
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            for (int w = 1; w < WAYS; w++) sum[0][n][h] = _mm512_add_ps(sum[0][n][h], sum[w][n][h]);
            _mm512_storeu_ps(sums + n * PANEL + h * 16, sum[0][n][h]);
        }
}
#else
constexpr bool ONE_ORDER = true;  // a row of x gets the same bits for any N in any case
constexpr int TOKENS = 6;  // 12 sums, 2 vectors of weights and one of x in 16 registers
constexpr int64_t CACHED = 192 << 10;  // bytes of rows of x that stay in a core's cache for all panels of a piece of work

// Eight floats: a CPU with shorter vectors uses several.
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t EightWords __attribute__((vector_size(32), aligned(4), may_alias));

// Column `d` of a pair of columns: of bf16, from words that hold both.
inline Eight column_of(EightWords pairs, int d) { return (Eight)(d ? pairs & int32_t(0xffff0000) : pairs << 16); }

// Eight rows of a panel, column `d` of the pair that begins at `at`.
inline Eight weights_at(const float *at, int d) { return *reinterpret_cast<const Eight *>(at + d * PANEL); }
inline Eight weights_at(const bf16 *at, int d) { return column_of(*reinterpret_cast<const EightWords *>(at), d); }

// x[d] of a pair of columns, eight times.
inline Eight value_at(const float *x, int d) { return Eight{} + x[d]; }
inline Eight value_at(const bf16 *x, int d) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof bits);
    EightWords pairs = EightWords{} + bits;
#ifdef __AVX2__
    asm("" : "+x"(pairs));  // or GCC takes the column of one word, in more instructions, before it repeats that
#endif
    return column_of(pairs, d);
}

// sum + a * b. GCC would add products of both columns first, which takes a register and an instruction more for each.
inline Eight add_product(Eight sum, Eight a, Eight b) {
#ifdef __FMA__
    return (Eight)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

// Sums of N rows of x with V vectors of a panel's rows: [N][PANEL]. A line per pair of columns and two vectors is
// prefetched.
template <int N, int V, class T>
void dense_strip(const T *panel, const T *x, int64_t cols, float *sums, const char *ahead, int64_t rate) {
    // In the order of columns whatever N is, so that a row of x gets the same bits beside others as alone.
    Eight sum[N][V] = {};
    const T *row[(N + 2) / 3];
    for (int n = 0; n < N; n += 3) row[n / 3] = x + n * cols;
    auto add = [&](int d, auto value_of) __attribute__((always_inline)) {
        Eight weights[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) weights[v] = weights_at(panel + v * 8 * DEPTH<T>, d);
#pragma GCC unroll 6
        for (int n = 0; n < N; n++) {
            Eight value = value_of(row[n / 3] + n % 3 * cols);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sum[n][v] = add_product(sum[n][v], weights[v], value);
        }
        asm volatile("" ::: "memory");  // or GCC keeps pairs of x for the next column, and no registers for sums
    };
    for (int64_t c = 0; c + 2 <= cols; c += 2, panel += 2 * PANEL) {
        const char *line = ahead + (c * rate >> 8);
#pragma GCC unroll 2
        for (int v = 0; v < V; v += 2) __builtin_prefetch(line + v * 32);
#pragma GCC unroll 2
        for (int d = 0; d < 2; d++) add(d, [d](const T *at) { return value_at(at, d); });
#pragma GCC unroll 2
        for (int n = 0; n < N; n += 3) row[n / 3] += 2;
    }
    if (cols % 2) add(0, [](const T *at) { return Eight{} + widen(*at); });
#pragma GCC unroll 6
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) *reinterpret_cast<Eight *>(sums + n * PANEL + v * 8) = sum[n][v];
}

// Sums of one tile, [N][PANEL]. `rate` / 256 bytes from `ahead` on, which is read next, are prefetched per column.
template <int N, bool, class T>
void dense_tile(const T *panel, const T *x, int64_t cols, float *sums, const char *ahead, int64_t rate) {
    if constexpr (N <= 2) return dense_strip<N, 4>(panel, x, cols, sums, ahead, rate);
    // More sums than there are registers: the halves of the panel in turns.
    dense_strip<N, 2>(panel, x, cols, sums, ahead, rate);
    dense_strip<N, 2>(panel + PANEL / 2 * DEPTH<T>, x, cols, sums + PANEL / 2, ahead + 64, rate);
}
#endif

// A tile of `tokens` tokens, a number that is known only at run time.
template <bool FIXED, class T, int... N>
void dense_tile_of(int64_t tokens, const T *panel, const T *x, int64_t cols, float *sums, const char *ahead,
                   int64_t rate, std::integer_sequence<int, N...>) {
    ((tokens == N + 1 && (dense_tile<N + 1, FIXED>(panel, x, cols, sums, ahead, rate), true)) || ...);
}

// What is read after a panel: while `tokens` tokens are multiplied, as many bytes as the panel has are prefetched from
// `at` on; none if `tokens` is 0. `before` of them have been multiplied by earlier calls.
struct Ahead {
    const char *at;
    int64_t tokens, before;
};

#ifdef WEFT_AMX
constexpr int64_t AMX_FEWEST = 3;  // tokens: fewer are as fast in vectors, as their weights come from memory

inline bool amx_multiplies(int64_t cols, int64_t tokens) {
    return tokens >= AMX_FEWEST && cols % AMX_COLUMNS == 0 && amx_allowed();
}
#endif

// Sums of `tokens` rows of x with a panel: [tokens][PANEL]. In a `fixed_order` those of a row do not depend on the
// others.
template <class T>
void dense_sums(const T *panel, const T *x, int64_t cols, int64_t tokens, float *sums, Ahead ahead, bool fixed_order) {
    int64_t bytes = panel_size<T>(cols) * int64_t(sizeof(T)), blocks = (tokens + TOKENS - 1) / TOKENS;
#ifdef WEFT_AMX
    if constexpr (sizeof(T) == 2)
        if (amx_multiplies(cols, tokens)) {
            bool alone = tokens <= 2 * AMX_TOKENS && ahead.tokens == tokens;
            int64_t all = std::max<int64_t>(ahead.tokens, 1), fetched = ahead.tokens ? bytes : 0;
            const char *at = alone ? reinterpret_cast<const char *>(panel + 2048)
                                   : ahead.at + fetched * ahead.before / all;
            return amx_product({panel, cols}, {x, cols, tokens}, sums, false, at, fetched * tokens / all);
        }
#endif
    // A block that has the panel for itself prefetches what it reads next. Of several blocks each prefetches its share
    // of the next panel: the first one alone would wait for all of it.
    bool alone = blocks == 1 && ahead.tokens == tokens;
    int64_t all = std::max<int64_t>(ahead.tokens, 1), fetched = ahead.tokens ? bytes : 0;
    for (int64_t b = 0; b < blocks; b++) {
        // Blocks of nearly equal size: a last block of two tokens would take as long as one of four.
        int64_t t = tokens * b / blocks, n = tokens * (b + 1) / blocks - t;
        const char *at = alone ? reinterpret_cast<const char *>(panel + 2048)
                               : ahead.at + fetched * (ahead.before + t) / all;
        int64_t rate = 256 * fetched * n / all / cols;
        auto by_tile = [&](auto fixed) {
            dense_tile_of<decltype(fixed)::value>(n, panel, x + t * cols, cols, sums + t * PANEL, at, rate,
                                                  std::make_integer_sequence<int, TOKENS>());
        };
        if constexpr (ONE_ORDER || sizeof(T) == 4)  // floats have one order in any case
            by_tile(std::true_type());
        else if (fixed_order)
            by_tile(std::true_type());
        else
            by_tile(std::false_type());
    }
}
