// Products of many tokens with quantised weights: a panel is dequantised to bf16, some columns at a time, and
// multiplied with the tokens' own rows by AMX. That takes less time than products of integers, and x is not rounded to
// 8 bits.
#pragma once

#include "amx.h"
#include "quantised.h"
#include "tabled.h"

#ifdef WEFT_AMX
constexpr int64_t DEQUANTISED = 512;    // columns at a time: 32 KiB, which stay in a core's cache
constexpr int64_t DEQUANTISED_FROM = 8;  // tokens

// Blocks [first, last) of a panel, to columns as dense.h has them.
template <class C> void dequantise(const Packed &panel, int64_t first, int64_t last, bf16 *to) {
    constexpr int BITS = C::BITS, PER_BLOCK = C::PER_BLOCK;
    typedef uint32_t words __attribute__((vector_size(4 * SLICE)));
    // Nearest bf16, in the upper half of each word.
    auto rounded = [](floats x) { return (words)x + 0x8000; };
    for (int64_t h = 0; h < SLICES; h++) {
        const char *at = panel.values + (first * SLICES + h) * (BLOCK_BYTES<BITS> / SLICES);
        char *out = reinterpret_cast<char *>(to) + h * SLICE * 4;
        for (int64_t block = first; block < last; block++, at += BLOCK_BYTES<BITS>) {
            floats scale[PER_BLOCK], lowest[PER_BLOCK];
            for (int64_t half = 0; half < PER_BLOCK; half++)
                panel.numbers_at<C>(panel.scale_index<C>(block, half), h, scale[half], lowest[half]);
            // Four columns of a slice, from column `c` of the block on.
            auto write = [&](words stored, int64_t c) {
                int64_t half = c / (BLOCK / PER_BLOCK);
                words bits[4];
                if constexpr (C::FLOAT8) {
                    floats each[4];
                    float8s((ints)stored, each);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) bits[j] = rounded(each[j] * FLOAT8_BIAS * scale[0]);
                } else if constexpr (C::WIDE && BITS == 4) {
                    floats each[4];
                    widen_four<C>((ints)stored, 0, each);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) bits[j] = rounded(each[j] * scale[0]);
                } else {
                    words four = (words)numbers<C>((ints)stored);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) {
                        ints q = (ints)(four >> (8 * j) & 255);
                        bits[j] = rounded(__builtin_convertvector(q, floats) * scale[half] + lowest[half]);
                    }
                }
#pragma GCC unroll 2
                for (int j = 0; j < 4; j += 2) {
                    words pair = bits[j] >> 16 | (bits[j + 1] & 0xffff0000);
                    std::memcpy(out + (c + j) / 2 * PANEL * 4, &pair, sizeof pair);
                }
            };
#pragma GCC unroll 8
            for (int v = 0; v < BITS; v++) {
                words w = load<words>(at + v * 4 * SLICE);
                if constexpr (BITS == 4) {
                    write(w & 0x0f0f0f0f, v * 4);
                    write(w >> 4 & 0x0f0f0f0f, BLOCK / 2 + v * 4);
                } else {
                    write(w, v * 4);
                }
            }
            out += BLOCK / 2 * PANEL * 4;
        }
    }
}

// Sums of `tokens` rows of x with a panel: [tokens][PANEL].
template <class C>
void dequantised_sums(const Packed &panel, const bf16 *x, int64_t tokens, float *sums) {
    alignas(64) bf16 columns[DEQUANTISED * PANEL];
    int64_t cols = panel.columns.blocks * BLOCK;
    for (int64_t c = 0; c < cols; c += DEQUANTISED) {
        int64_t count = std::min(DEQUANTISED, cols - c);
        dequantise<C>(panel, c / BLOCK, (c + count) / BLOCK, columns);
        amx_product({columns, count}, {x + c, cols, tokens}, sums, c > 0, nullptr, 0);
    }
}
#endif
