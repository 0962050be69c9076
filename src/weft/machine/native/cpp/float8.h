// Products with weights that become floats (FP8 and those of tabled.h), in panels as quantised.h has them, with scales
// of 32 bits.
//
// Weights become floats without a loss, and x is multiplied as it is: only the weights are rounded, by whoever published
// them.
#pragma once

#include <utility>

#include "quantised.h"
#include "tabled.h"

constexpr int64_t FLOAT8_FEW = 4;    // tokens at most for which weights are multiplied as they are read
constexpr int64_t FLOAT8_COLUMNS = 128;  // that are made floats at once for more tokens: 16 KiB of a panel
// Tokens of a tile then: it has two sums for each, and registers for a vector of x and two of weights.
constexpr int64_t FLOAT8_TOKENS = SLICE == 16 ? 12 : 6;

inline int64_t float8_row_bytes(int64_t cols) { return (cols * int64_t(sizeof(float)) + 63) / 64 * 64; }

template <class T> void float8_row(const T *x, int64_t cols, float factor, char *to) {
    float *out = reinterpret_cast<float *>(to);
#pragma omp simd
    for (int64_t c = 0; c < cols; c++) out[c] = widen(x[c]) * factor;
}

// Sums of N rows of x, `stride` floats apart, with H slices of a panel from slice `first` on: [N][PANEL].
template <class C, int N, int H>
[[gnu::noinline]] void float8_tile(const Packed &panel, const float *x, int64_t stride, int64_t first, float *sums) {
    // Products of a slice are added to several sums in turn, or each would wait for the last.
    constexpr int WAYS = N * H >= 8 ? 1 : N * H >= 4 ? 2 : 4;
    constexpr int64_t BYTES = BLOCK_BYTES<C::BITS>;
    const Grouping &columns = panel.columns;
    floats total[N][H] = {};
    const char *at = panel.values + first * BYTES / SLICES;
    for (int64_t g = 0, block = 0; block < columns.blocks; g++) {
        floats sum[WAYS][N][H] = {};
        for (int64_t end = columns.end(g); block < end; block++, at += BYTES) {
#pragma GCC unroll 16
            for (int64_t line = 0; line < H * BYTES / SLICES; line += 64) __builtin_prefetch(at + AHEAD + line);
            const float *value = x + block * BLOCK;
            for (int64_t v = 0; v < C::BITS; v++, value += 4)
#pragma GCC unroll 4
                for (int h = 0; h < H; h++) {
                    ints stored = load<ints>(at + h * BYTES / SLICES + v * 4 * SLICE);
#pragma GCC unroll 2
                    for (int half = 0; half < 8 / C::BITS; half++) {
                        floats four[4];
                        widen_four<C>(stored, half, four);
#pragma GCC unroll 4
                        for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
                            for (int n = 0; n < N; n++)
                                sum[j % WAYS][n][h] += four[j] * value[n * stride + half * (BLOCK / 2) + j];
                    }
                }
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            floats scale = panel.scales_at(g * PANEL + (first + h) * SLICE) * FACTOR<C>;
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                for (int w = 1; w < WAYS; w++) sum[0][n][h] += sum[w][n][h];
                total[n][h] += sum[0][n][h] * scale;
            }
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) std::memcpy(sums + n * PANEL + (first + h) * SLICE, &total[n][h], sizeof(floats));
}

template <class C, int N> void float8_few(const Packed &panel, const float *x, int64_t stride, float *sums) {
    constexpr int H = N <= 2 ? SLICES : 2;
    for (int64_t first = 0; first < SLICES; first += H) float8_tile<C, N, H>(panel, x, stride, first, sums);
}

// Blocks [first, last) of a panel, which share a scale, as floats with that scale, times 2^-60 if they are
// FP8: [columns][PANEL].
template <class C> void widen_float8(const Packed &panel, int64_t group, int64_t first, int64_t last, float *to) {
    constexpr int64_t BYTES = BLOCK_BYTES<C::BITS>;
    for (int64_t h = 0; h < SLICES; h++) {
        floats scale = panel.scales_at(group * PANEL + h * SLICE) * FACTOR<C>;
        for (int64_t block = first; block < last; block++) {
            const char *at = panel.values + block * BYTES + h * BYTES / SLICES;
            float *out = to + (block - first) * BLOCK * PANEL + h * SLICE;
            for (int64_t v = 0; v < C::BITS; v++)
                for (int half = 0; half < 8 / C::BITS; half++) {
                    floats four[4];
                    widen_four<C>(load<ints>(at + v * 4 * SLICE), half, four);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) {
                        floats scaled = four[j] * scale;
                        std::memcpy(out + (half * (BLOCK / 2) + v * 4 + j) * PANEL, &scaled, sizeof scaled);
                    }
                }
        }
    }
}

// sums [N][PANEL] += products of N rows of x, `stride` floats apart, with `cols` columns of two slices.
template <int N>
[[gnu::noinline]] void widened_tile(const float *panel, const float *x, int64_t stride, int64_t cols, float *sums) {
    floats sum[N][2];
#pragma GCC unroll 12
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) sum[n][h] = load<floats>(sums + n * PANEL + h * SLICE);
    for (int64_t c = 0; c < cols; c++) {
        floats low = load<floats>(panel + c * PANEL), high = load<floats>(panel + c * PANEL + SLICE);
#pragma GCC unroll 12
        for (int n = 0; n < N; n++) {
            floats value = floats{} + x[n * stride + c];
            sum[n][0] = multiply_add(sum[n][0], low, value);
            sum[n][1] = multiply_add(sum[n][1], high, value);
        }
    }
#pragma GCC unroll 12
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) std::memcpy(sums + n * PANEL + h * SLICE, &sum[n][h], sizeof(floats));
}

template <int... N>
void widened_tile(int64_t tokens, const float *panel, const float *x, int64_t stride, int64_t cols, float *sums,
                  std::integer_sequence<int, N...>) {
    ((tokens == N + 1 && (widened_tile<N + 1>(panel, x, stride, cols, sums), true)) || ...);
}

// The same as `float8_few` for any number of tokens: some columns are made floats once, for all of them.
template <class C> void float8_many(const Packed &panel, const float *x, int64_t stride, int64_t tokens, float *sums) {
    alignas(64) float widened[FLOAT8_COLUMNS * PANEL];
    constexpr int64_t STEP = FLOAT8_COLUMNS / BLOCK;
    const Grouping &columns = panel.columns;
    int64_t tiles = (tokens + FLOAT8_TOKENS - 1) / FLOAT8_TOKENS;
    std::fill(sums, sums + tokens * PANEL, 0.0f);
    for (int64_t g = 0, block = 0; block < columns.blocks; g++)
        for (int64_t end = columns.end(g); block < end; block = std::min(block + STEP, end)) {
            int64_t last = std::min(block + STEP, end);
            widen_float8<C>(panel, g, block, last, widened);
            // Tiles of nearly equal size, as in dense.h.
            for (int64_t i = 0; i < tiles; i++) {
                int64_t t = tokens * i / tiles, n = tokens * (i + 1) / tiles - t;
                for (int64_t h = 0; h < PANEL; h += 2 * SLICE)
                    widened_tile(n, widened + h, x + t * stride + block * BLOCK, stride, (last - block) * BLOCK,
                                 sums + t * PANEL + h, std::make_integer_sequence<int, FLOAT8_TOKENS>());
            }
        }
}

// Sums of `tokens` prepared rows of x with a panel: [tokens][PANEL]. In a `fixed_order` by one way for any number of them.
template <class C>
void float8_sums(const Packed &panel, const char *x, int64_t tokens, float *sums, bool fixed_order) {
    static_assert(C::WIDE);
    const float *rows = reinterpret_cast<const float *>(x);
    int64_t stride = float8_row_bytes(panel.columns.blocks * BLOCK) / int64_t(sizeof(float));
    if (fixed_order) return float8_many<C>(panel, rows, stride, tokens, sums);
    switch (tokens) {
        case 1: return float8_few<C, 1>(panel, rows, stride, sums);
        case 2: return float8_few<C, 2>(panel, rows, stride, sums);
        case 3: return float8_few<C, 3>(panel, rows, stride, sums);
        case FLOAT8_FEW: return float8_few<C, 4>(panel, rows, stride, sums);
        default: return float8_many<C>(panel, rows, stride, tokens, sums);
    }
}
