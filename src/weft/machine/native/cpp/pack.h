// Packing of quantised rows into panels, see quantised.h.
#pragma once

#include "quantised.h"

// values [rows][blocks][BLOCK], unsigned; with 4 bits, the two halves of a block are the nibbles of BLOCK / 2 bytes.
template <int BITS> void pack_values(const char *values, char *to, int64_t rows, int64_t blocks, int64_t threads) {
    constexpr int64_t WORDS = BLOCK * BITS / 32;  // that a row has in a block
    int64_t panels = (rows + PANEL - 1) / PANEL, size = blocks * BLOCK_BYTES<BITS>, words = blocks * WORDS;
    auto pack = [&](int64_t first, int64_t last) {
        for (int64_t p = first; p < last; p++) {
            auto from = [&](int64_t r, int64_t w) { return values + ((p * PANEL + r) * words + w) * 4; };
            auto at = [&](int64_t r, int64_t w) {
                int64_t line = r / SLICE * WORDS + w % WORDS;
                return to + p * size + w / WORDS * BLOCK_BYTES<BITS> + (line * SLICE + r % SLICE) * 4;
            };
            int64_t w = 0, count = std::min(PANEL, rows - p * PANEL);
            if (count == PANEL)
                for (; w + SQUARE <= words; w += SQUARE)
                    for (int64_t r = 0; r < PANEL; r += SQUARE) {
                        char square[SQUARE][SQUARE * 4];
                        transpose(from(r, w), words * 4, square, sizeof square[0]);
                        for (int64_t i = 0; i < SQUARE; i++)
                            for (int64_t s = 0; s < SQUARE; s += SLICE)
                                std::memcpy(at(r + s, w + i), square[i] + s * 4, SLICE * 4);
                    }
            for (; w < words; w++)
                for (int64_t r = 0; r < PANEL; r++)
                    if (r < count)
                        std::memcpy(at(r, w), from(r, w), 4);
                    else
                        std::memset(at(r, w), 0, 4);
        }
    };
    together(threads, rows * blocks * BLOCK > SMALL, [&](Team &team) { team.each(panels, pack); });
}

// One number of `size` bytes for each group: from [rows][groups] to [groups][PANEL] of each panel.
inline void pack_groups(const char *from, char *to, int64_t rows, int64_t groups, int64_t size) {
    for (int64_t p = 0; p < (rows + PANEL - 1) / PANEL; p++)
        for (int64_t g = 0; g < groups; g++)
            for (int64_t r = 0; r < PANEL; r++) {
                int64_t row = p * PANEL + r;
                char *at = to + ((p * groups + g) * PANEL + r) * size;
                if (row < rows)
                    std::memcpy(at, from + (row * groups + g) * size, size);
                else
                    std::memset(at, 0, size);
            }
}
